#include "kvstore/index/auto_index.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include "common/status.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/index_type.h"

namespace carrel::kvstore {
namespace {

// Queries that judge, at most, and how many times `wanted` they must see.
constexpr int64_t kJudges = 16;
constexpr int64_t kLeastZone = 8;
// Efforts tried per kind, each twice the one before.
constexpr int kEfforts = 7;

struct Judge {
  SearchRequest request;
  SearchResult exact;
  double exact_us = 0;
};

double CostNs(const IndexParams& params, const SearchResult& result, int64_t group, int64_t zone) {
  if (result.zone_scored) return kInOrderNs * static_cast<double>(result.visited);
  return IndexTypeOf(params.kind).SearchNs(params, result, group, zone);
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

// Samples that build, and the places of those that may judge: of the odd ones those that see
// enough.
struct Split {
  SampledQueries builders;
  std::vector<int64_t> judges;
};

Split SplitOf(const SampledQueries& queries, int64_t least_zone) {
  Split split;
  split.builders.group = queries.group;
  split.builders.head_dim = queries.head_dim;
  for (int64_t i = 0; i < queries.samples(); ++i) {
    if (i % 2 == 0) {
      split.builders.positions.push_back(queries.positions[static_cast<size_t>(i)]);
      const float* first = queries.Query(i, 0);
      split.builders.queries.insert(split.builders.queries.end(), first,
                                    first + queries.group * queries.head_dim);
    } else if (queries.positions[static_cast<size_t>(i)] >= least_zone) {
      split.judges.push_back(i);
    }
  }
  return split;
}

// With what an exact search finds for each.
absl::StatusOr<std::vector<Judge>> JudgesOf(const SampledQueries& queries,
                                            const std::vector<int64_t>& odd, int64_t wanted,
                                            const Rows& keys, SearchScratch& scratch) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Index> flat, OpenIndex({}, Blob(), keys));
  std::vector<Judge> judges;
  const auto count = static_cast<int64_t>(odd.size()), used = std::min<int64_t>(kJudges, count);
  for (int64_t i = 0; i < used; ++i) {
    // The late ones see most, as the questions will.
    const int64_t sample = odd[odd.size() - 1 - static_cast<size_t>(i * count / (2 * used))];
    Judge judge;
    judge.request.queries = queries.Query(sample, 0);
    judge.request.group = queries.group;
    judge.request.scale = 1.0f / std::sqrt(static_cast<float>(keys.head_dim()));
    judge.request.zone = {0, queries.positions[static_cast<size_t>(sample)]};
    judge.request.top_k = wanted;
    absl::Status status;
    judge.exact_us =
        Microseconds([&] { status = flat->Search(judge.request, scratch, judge.exact); });
    RETURN_IF_ERROR(status);
    judges.push_back(std::move(judge));
  }
  return judges;
}

struct Found {
  int32_t effort = 0;
  Verdict verdict;
};

// Null: none reaches it.
absl::StatusOr<std::optional<Found>> LeastEffortThatReaches(const AutoIndexConfig& config,
                                                            const Index& index,
                                                            const IndexParams& params,
                                                            std::vector<Judge>& judges,
                                                            SearchScratch& scratch) {
  const IndexType& type = IndexTypeOf(params.kind);
  auto effort =
      static_cast<int32_t>(std::min<int64_t>(type.FirstEffort(config.wanted), kMaxEffort));
  for (int i = 0; i < kEfforts && effort <= kMaxEffort; ++i, effort *= 2) {
    ASSIGN_OR_RETURN(const Verdict verdict, Try(index, params, effort, judges, scratch));
    if (verdict.recall >= config.want_recall) return Found{effort, verdict};
    if (type.exact()) break;
  }
  return std::nullopt;
}

}  // namespace

std::vector<IndexKind> AutomaticKinds() {
  std::vector<IndexKind> kinds;
  for (const IndexKind kind : kAllIndexKinds) {
    if (IndexTypeOf(kind).automatic()) kinds.push_back(kind);
  }
  return kinds;
}

IndexKind LargestAutomaticKind(int64_t head_dim) {
  const std::vector<IndexKind> kinds = AutomaticKinds();
  return *std::max_element(kinds.begin(), kinds.end(), [head_dim](IndexKind a, IndexKind b) {
    return IndexTypeOf(a).BytesPerKey({.kind = a}, head_dim) <
           IndexTypeOf(b).BytesPerKey({.kind = b}, head_dim);
  });
}

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
    RETURN_IF_ERROR(CheckIndexBuild(params));
  }
  return absl::OkStatus();
}

absl::StatusOr<AutoIndex> BuildAutoIndex(const AutoIndexConfig& config, const Rows& keys,
                                         const SampledQueries& queries, Accelerator* accelerator) {
  RETURN_IF_ERROR(ValidateAutoIndexConfig(config));
  const Split split = SplitOf(queries, kLeastZone * config.wanted);
  AutoIndex best;
  if (split.judges.empty()) return best;
  SearchScratch scratch;
  ASSIGN_OR_RETURN(std::vector<Judge> judges,
                   JudgesOf(queries, split.judges, config.wanted, keys, scratch));
  std::vector<double> exact_us;
  for (const Judge& judge : judges) exact_us.push_back(judge.exact_us);
  best.queries = static_cast<int64_t>(judges.size());
  best.exact_us = Median(exact_us);
  double least_cost = INFINITY;
  for (const IndexKind kind : config.kinds) {
    IndexParams params = config.params;
    params.kind = kind;
    ASSIGN_OR_RETURN(std::string blob, BuildIndex(params, keys, &split.builders, accelerator));
    ASSIGN_OR_RETURN(const std::unique_ptr<Index> index, OpenIndex(params, Blob(blob), keys));
    ASSIGN_OR_RETURN(const std::optional<Found> found,
                     LeastEffortThatReaches(config, *index, params, judges, scratch));
    if (!found.has_value() || found->verdict.cost_ns >= least_cost) continue;
    least_cost = found->verdict.cost_ns;
    params.effort = found->effort;
    best.params = params;
    best.blob = std::move(blob);
    best.recall = found->verdict.recall;
    best.mass = found->verdict.mass;
    best.cost_us = found->verdict.us;
  }
  return best;
}

}  // namespace carrel::kvstore
