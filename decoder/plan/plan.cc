#include "decoder/plan/plan.h"

#include <algorithm>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/progress.h"

namespace carrel::decoder {
namespace {

// Of rows that are selected something is kept beside the rows: summaries, codes, a workspace.
constexpr double kBesideRows = 1.06;
// Of a device's memory that a plan counts on: the rest is fragments and the driver's.
constexpr double kUsable = 0.97;

int64_t RowBytes(const PlanQuestion& question) {
  const AttentionShape& shape = question.shape;
  return int64_t{shape.layers} * shape.kv_heads * question.zone_rows * shape.head_dim * 4;
}

std::string Unfit(const PlanQuestion& question, const PlannedWay& planned) {
  const Way way = planned.way;
  if (question.place.has_value() && *question.place != way.place)
    return "another place was asked for";
  if (question.dense.has_value() && *question.dense != way.dense)
    return way.dense ? "a number of rows was asked for" : "all rows were asked for";
  if (const std::string& why = question.unfit[static_cast<size_t>(way.place)]; !why.empty())
    return why;
  if (!way.dense && question.chosen_rows < 0) return "the context was not measured";
  if (way.place == Place::kDevice) {
    const auto usable = static_cast<int64_t>(kUsable * static_cast<double>(question.device_bytes));
    const int64_t needed = question.model_bytes + planned.bytes;
    if (needed > usable) {
      return absl::StrCat("rows and model need ", FormatBytes(needed),
                          " of the GPU's memory, there are ", FormatBytes(usable));
    }
  }
  if (way.place == Place::kHost && question.host_bytes > 0 && planned.bytes > question.host_bytes) {
    return absl::StrCat("rows need ", FormatBytes(planned.bytes), " of pinned memory, there are ",
                        FormatBytes(question.host_bytes));
  }
  return "";
}

std::string Milliseconds(double seconds) { return absl::StrFormat("%.2f ms", 1e3 * seconds); }

std::string Line(const PlannedWay& planned) {
  return absl::StrCat(WayName(planned.way), ": ", DescribeWay(planned.way), ", ",
                      Milliseconds(planned.seconds), " of a token, error ",
                      planned.error == 0 ? "0" : absl::StrFormat("%.3f", planned.error));
}

}  // namespace

absl::StatusOr<Plan> MakePlan(const PlanQuestion& question, const Rates& rates) {
  Plan plan;
  plan.machine = rates.machine;
  const auto layers = static_cast<double>(question.zone_layers);
  std::optional<size_t> best;
  std::vector<std::string> reasons;
  for (size_t i = 0; i < kWays.size(); ++i) {
    PlannedWay& planned = plan.ways[i];
    planned.way = kWays[i];
    const int64_t all = question.zone_layers * question.shape.kv_heads * question.zone_rows;
    const int64_t chosen =
        planned.way.dense ? all : std::min(all, std::max<int64_t>(0, question.chosen_rows));
    if (layers > 0) {
      planned.seconds = layers * rates.ways[i].Seconds(static_cast<double>(question.zone_rows),
                                                       static_cast<double>(chosen) / layers);
    }
    planned.error = planned.way.dense ? 0 : question.promised;
    if (planned.way.place != Place::kStore) {
      planned.bytes = static_cast<int64_t>(static_cast<double>(RowBytes(question)) *
                                           (planned.way.dense ? 1 : kBesideRows));
    }
    planned.unfit = Unfit(question, planned);
    if (!planned.unfit.empty()) {
      const bool asked = question.place.value_or(planned.way.place) == planned.way.place &&
                         question.dense.value_or(planned.way.dense) == planned.way.dense;
      if (!asked) continue;
      reasons.push_back(absl::StrCat(WayName(planned.way), ": ", planned.unfit));
      continue;
    }
    if (!best.has_value() || planned.seconds < plan.ways[*best].seconds) best = i;
  }
  if (!best.has_value()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "plan: no way to attend to the context is left: ", absl::StrJoin(reasons, "; ")));
  }
  plan.chosen = *best;
  return plan;
}

std::string PlanTable(const Plan& plan) {
  std::string table = absl::StrCat("plan ", Line(plan.taken()), "\n");
  for (size_t i = 0; i < plan.ways.size(); ++i) {
    if (i == plan.chosen) continue;
    const PlannedWay& other = plan.ways[i];
    absl::StrAppend(
        &table, "  not ",
        other.unfit.empty() ? Line(other) : absl::StrCat(WayName(other.way), ": ", other.unfit),
        "\n");
  }
  absl::StrAppend(&table, "  rates of ", plan.machine, "\n");
  return table;
}

}  // namespace carrel::decoder
