#include "decoder/fidelity.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace carrel::decoder {
namespace {

// Steps between two measured numbers of rows, which are a factor of two apart.
constexpr int64_t kSteps = 4;

// By their Fidelity.
constexpr struct {
  absl::string_view name;
  double error;
} kFidelities[] = {{"fast", 0.05}, {"balanced", 0.03}, {"faithful", 0.016}};

// A choice for one head: k rows leave this share of the layer's mean square.
struct Choice {
  int64_t rows;
  double error;
};

// What a head may take, by rows; e between measurements as a power of k.
std::vector<Choice> ChoicesOf(const HeadErrors& head, int64_t zone_rows) {
  std::vector<Choice> choices;
  const double scale = head.output > 0 ? 1 / head.output : 0;
  for (size_t i = 0; i < head.rows.size() && head.rows[i] < zone_rows; ++i) {
    choices.push_back({head.rows[i], scale * head.error[i]});
    if (i + 1 == head.rows.size()) break;
    const double a = head.error[i], b = head.error[i + 1];
    const double from = static_cast<double>(head.rows[i]),
                 to = static_cast<double>(head.rows[i + 1]);
    for (int64_t step = 1; step < kSteps; ++step) {
      const double t = static_cast<double>(step) / kSteps;
      const int64_t rows = std::llround(from * std::pow(to / from, t));
      if (rows >= zone_rows) break;
      const double error = a > 0 && b > 0 ? a * std::pow(b / a, t) : a + (b - a) * t;
      choices.push_back({rows, scale * error});
    }
  }
  if (head.rows.back() >= zone_rows || choices.empty()) choices.push_back({zone_rows, 0});
  return choices;
}

const Choice& Cheapest(const std::vector<Choice>& choices, double price) {
  return *std::min_element(choices.begin(), choices.end(),
                           [price](const Choice& a, const Choice& b) {
                             return a.error + price * static_cast<double>(a.rows) <
                                    b.error + price * static_cast<double>(b.rows);
                           });
}

}  // namespace

double TargetError(Fidelity fidelity) { return kFidelities[static_cast<size_t>(fidelity)].error; }

absl::StatusOr<Fidelity> ParseFidelity(absl::string_view name) {
  for (size_t i = 0; i < std::size(kFidelities); ++i) {
    if (name == kFidelities[i].name) return static_cast<Fidelity>(i);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("fidelity=", name, " is none of fast, balanced, faithful"));
}

bool MeasuredOnProbe(const retrieval::ContextFacts& context) {
  return !context.fidelity.empty() && context.fidelity.front().probed;
}

absl::StatusOr<std::vector<HeadErrors>> ErrorsOf(const retrieval::ContextFacts& context,
                                                 bool estimate) {
  const int64_t kv_heads = context.shape.kv_heads, heads = context.shape.layers * kv_heads;
  if (context.fidelity.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("context ", context.name, " was not measured: how many rows reach a ",
                     "fidelity is not known; carrel reindex ", context.name,
                     " --as NEW measures it, --top-k N does without"));
  }
  if (static_cast<int64_t>(context.fidelity.size()) != heads) {
    return absl::DataLossError(absl::StrCat("manifest: fidelity of ", context.fidelity.size(),
                                            " heads instead of ", heads));
  }
  std::vector<HeadErrors> errors(static_cast<size_t>(heads));
  for (int64_t i = 0; i < heads; ++i) {
    const retrieval::HeadFidelity& from = context.fidelity[static_cast<size_t>(i)];
    HeadErrors& to = errors[static_cast<size_t>(i)];
    to.rows = from.rows;
    to.error = estimate ? from.error : from.error_without;
    bool whole = from.layer == i / kv_heads && from.kv_head == i % kv_heads && !to.rows.empty() &&
                 to.rows.size() == to.error.size() && to.rows.front() >= 1;
    for (size_t j = 0; whole && j < to.rows.size(); ++j) {
      whole =
          to.error[j] >= 0 && std::isfinite(to.error[j]) && (j == 0 || to.rows[j] > to.rows[j - 1]);
    }
    if (!whole || !(from.output >= 0)) {
      return absl::DataLossError(absl::StrCat("manifest: fidelity of layer ", i / kv_heads,
                                              " kv_head ", i % kv_heads, " is not whole"));
    }
    to.output = from.output;
  }
  for (size_t first = 0; first < errors.size(); first += static_cast<size_t>(kv_heads)) {
    double sum = 0;
    for (int64_t h = 0; h < kv_heads; ++h) sum += errors[first + static_cast<size_t>(h)].output;
    for (int64_t h = 0; h < kv_heads; ++h) {
      errors[first + static_cast<size_t>(h)].output = sum / static_cast<double>(kv_heads);
    }
  }
  return errors;
}

RowPlan PlanRows(const std::vector<HeadErrors>& heads, int64_t first, int64_t zone_rows,
                 double target) {
  std::vector<std::vector<Choice>> choices;
  for (size_t i = static_cast<size_t>(first); i < heads.size(); ++i) {
    choices.push_back(ChoicesOf(heads[i], zone_rows));
  }
  RowPlan plan;
  plan.rows.assign(heads.size(), 0);
  const auto take = [&](double price) {
    double sum = 0;
    for (size_t i = 0; i < choices.size(); ++i) {
      const Choice& choice = Cheapest(choices[i], price);
      plan.rows[static_cast<size_t>(first) + i] = choice.rows;
      sum += choice.error;
    }
    plan.error = choices.empty() ? 0 : std::sqrt(sum / static_cast<double>(heads.size()));
  };
  double dear = 1, free = 1e-12;  // prices: too dear, and so low that all rows are taken
  take(free);
  if (plan.error >= target) return plan;
  for (int step = 0; step < 60; ++step) {
    const double price = std::sqrt(dear * free);
    take(price);
    (plan.error <= target ? free : dear) = price;
  }
  take(free);
  return plan;
}

}  // namespace carrel::decoder
