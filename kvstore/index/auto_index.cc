#include "kvstore/index/auto_index.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>
#include <utility>

#include "common/status.h"
#include "kvstore/format/sampled_queries.h"

namespace carrel::kvstore {
namespace {

// Queries that judge, at most, and how many times `wanted` they must see.
constexpr int64_t kJudges = 16;
constexpr int64_t kLeastZone = 8;
// Efforts tried per kind, each twice the one before.
constexpr int kEfforts = 7;

// Nanoseconds per row and q head of the group, on 2 AVX-512 cores at head_dim 128: read in order,
// in 8 bits, as a code of 128 bits, at random by the group, at random by one head that goes from
// link to link (21 times kInOrder there, 26 times at head_dim 64).
constexpr double kInOrder = 2.2, kInOrderInt8 = 1.2, kAsCode = 0.2, kAtRandom = 10, kWalked = 46;

struct Judge {
  SearchRequest request;
  SearchResult exact;
  double exact_us = 0;
};

double CostNs(const IndexParams& params, const SearchResult& result, int64_t group, int64_t zone) {
  const auto visited = static_cast<double>(result.visited);
  if (result.zone_scored) return kInOrder * visited;
  switch (params.kind) {
    case IndexKind::kFlat:
      return kInOrder * visited;
    case IndexKind::kCode: {
      const auto scanned = static_cast<double>(group * zone);
      return kAsCode * params.code_bits / 128 * scanned + kAtRandom * (visited - scanned);
    }
    case IndexKind::kInt8: {
      const auto scanned = static_cast<double>(group * zone);
      return kInOrderInt8 * scanned + kAtRandom * (visited - scanned);
    }
    case IndexKind::kIvf:
      return kAtRandom * visited;
    case IndexKind::kHnsw:
    case IndexKind::kGraph:
      return kWalked * visited;
  }
  return INFINITY;
}

template <typename Fn>
double Microseconds(Fn&& fn) {
  const auto start = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

int32_t FirstEffort(IndexKind kind, int64_t wanted) {
  switch (kind) {
    case IndexKind::kFlat:
      return 0;
    case IndexKind::kIvf:
      return 4;
    default:
      return static_cast<int32_t>(std::min<int64_t>(wanted, kMaxEffort));
  }
}

struct Verdict {
  double recall = 0, mass = 0, cost_ns = 0, us = 0;
};

absl::StatusOr<Verdict> Try(const Index& index, const IndexParams& params, int32_t effort,
                            std::vector<Judge>& judges, SearchScratch& scratch) {
  Verdict verdict;
  std::vector<double> times;
  for (Judge& judge : judges) {
    SearchRequest request = judge.request;
    request.effort = effort;
    SearchResult found;
    absl::Status status;
    times.push_back(Microseconds([&] { status = index.Search(request, scratch, found); }));
    RETURN_IF_ERROR(status);
    const std::set<Position> exact(judge.exact.ids.begin(), judge.exact.ids.end());
    int64_t hits = 0;
    for (const Position id : found.ids) hits += static_cast<int64_t>(exact.count(id));
    verdict.recall += static_cast<double>(hits) / static_cast<double>(exact.size());
    double mass = 0;
    const auto rows = static_cast<int64_t>(found.ids.size());
    for (int64_t h = 0; h < request.group; ++h) {
      for (int64_t j = 0; j < rows; ++j) {
        mass += std::exp(double{found.scores[static_cast<size_t>(h * rows + j)]} -
                         judge.exact.zone_lse[static_cast<size_t>(h)]);
      }
    }
    verdict.mass += mass / static_cast<double>(request.group);
    verdict.cost_ns += CostNs(params, found, request.group, request.zone.rows());
  }
  const auto count = static_cast<double>(judges.size());
  verdict.recall /= count;
  verdict.mass /= count;
  verdict.cost_ns /= count;
  verdict.us = Median(times);
  return verdict;
}

}  // namespace

absl::Status ValidateAutoIndexConfig(const AutoIndexConfig& config) {
  if (!(config.want_recall > 0 && config.want_recall <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("auto index: want_recall=", config.want_recall, " is outside (0, 1]"));
  }
  if (config.wanted < 1 || config.wanted > kMaxEffort) {
    return absl::InvalidArgumentError(
        absl::StrCat("auto index: wanted=", config.wanted, " is outside [1, ", kMaxEffort, "]"));
  }
  for (const IndexKind kind : config.kinds) {
    IndexParams params = config.params;
    params.kind = kind;
    RETURN_IF_ERROR(ValidateIndexParams(params));
  }
  return absl::OkStatus();
}

absl::StatusOr<AutoIndex> BuildAutoIndex(const AutoIndexConfig& config, const Rows& keys,
                                         const SampledQueries& queries, Accelerator* accelerator) {
  RETURN_IF_ERROR(ValidateAutoIndexConfig(config));
  const int64_t d = keys.head_dim(), group = queries.group;
  SampledQueries builders;
  builders.group = group;
  builders.head_dim = queries.head_dim;
  std::vector<int64_t> odd;
  for (int64_t i = 0; i < queries.samples(); ++i) {
    if (i % 2 == 0) {
      builders.positions.push_back(queries.positions[static_cast<size_t>(i)]);
      const float* first = queries.Query(i, 0);
      builders.queries.insert(builders.queries.end(), first, first + group * d);
    } else if (queries.positions[static_cast<size_t>(i)] >= kLeastZone * config.wanted) {
      odd.push_back(i);
    }
  }
  AutoIndex best;
  if (odd.empty()) return best;

  SearchScratch scratch;
  ASSIGN_OR_RETURN(const std::unique_ptr<Index> flat, OpenIndex({}, Blob(), keys));
  std::vector<Judge> judges;
  std::vector<double> exact_us;
  const auto used = std::min<int64_t>(kJudges, static_cast<int64_t>(odd.size()));
  for (int64_t i = 0; i < used; ++i) {
    // The late ones see most, as the questions will.
    const int64_t sample =
        odd[odd.size() - 1 -
            static_cast<size_t>(i * static_cast<int64_t>(odd.size()) / (2 * used))];
    Judge judge;
    judge.request.queries = queries.Query(sample, 0);
    judge.request.group = group;
    judge.request.scale = 1.0f / std::sqrt(static_cast<float>(d));
    judge.request.zone = {0, queries.positions[static_cast<size_t>(sample)]};
    judge.request.top_k = config.wanted;
    absl::Status status;
    judge.exact_us =
        Microseconds([&] { status = flat->Search(judge.request, scratch, judge.exact); });
    RETURN_IF_ERROR(status);
    exact_us.push_back(judge.exact_us);
    judges.push_back(std::move(judge));
  }
  best.queries = used;
  best.exact_us = Median(exact_us);
  double least_cost = INFINITY;
  for (const IndexKind kind : config.kinds) {
    IndexParams params = config.params;
    params.kind = kind;
    ASSIGN_OR_RETURN(std::string blob, BuildIndex(params, keys, &builders, accelerator));
    ASSIGN_OR_RETURN(const std::unique_ptr<Index> index, OpenIndex(params, Blob(blob), keys));
    int32_t effort = FirstEffort(kind, config.wanted);
    for (int i = 0; i < kEfforts && effort <= kMaxEffort; ++i, effort *= 2) {
      ASSIGN_OR_RETURN(const Verdict verdict, Try(*index, params, effort, judges, scratch));
      if (verdict.recall >= config.want_recall) {
        if (verdict.cost_ns < least_cost) {
          least_cost = verdict.cost_ns;
          params.effort = effort;
          best.params = params;
          best.blob = std::move(blob);
          best.recall = verdict.recall;
          best.mass = verdict.mass;
          best.cost_us = verdict.us;
        }
        break;
      }
      if (kind == IndexKind::kFlat) break;
    }
  }
  return best;
}

}  // namespace carrel::kvstore
