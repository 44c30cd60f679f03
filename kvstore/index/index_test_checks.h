// What: how tests build, search and judge any index. Tests only.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "common/test_util.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/index_test_util.h"

namespace carrel::kvstore {

inline SearchResult MustSearch(const Index& index, const SearchRequest& request) {
  SearchScratch scratch;
  SearchResult result;
  CARREL_EXPECT_OK(index.Search(request, scratch, result));
  return result;
}

inline std::unique_ptr<Index> MustBuild(const IndexParams& params, const Rows& rows,
                                        const SampledQueries* queries = nullptr) {
  auto blob = BuildIndex(params, rows, queries);
  CARREL_EXPECT_OK(blob);
  auto index = OpenIndex(params, *std::move(blob), rows);
  CARREL_EXPECT_OK(index);
  return *std::move(index);
}

// The definition: every row scored alone, all rows sorted.
inline SearchResult BruteForce(const KeySet& keys, const SearchRequest& request) {
  const int64_t rows = request.zone.rows();
  std::vector<float> scores(static_cast<size_t>(request.group * rows));
  for (int64_t j = 0; j < rows; ++j) {
    kernels::DotScore(request.queries, request.group, keys.head_dim,
                      keys.Row(request.zone.begin + j), 1, request.scale, scores.data() + j, rows);
  }
  SearchResult result;
  std::vector<float> best(static_cast<size_t>(rows), -INFINITY);
  for (int64_t h = 0; h < request.group; ++h) {
    const float* of_head = scores.data() + h * rows;
    result.zone_lse.push_back(kernels::LogSumExp(of_head, rows));
    for (int64_t j = 0; j < rows; ++j) {
      best[static_cast<size_t>(j)] =
          std::max(best[static_cast<size_t>(j)], of_head[j] - result.zone_lse.back());
    }
  }
  std::vector<int64_t> order(static_cast<size_t>(rows));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&best](int64_t a, int64_t b) {
    return best[static_cast<size_t>(a)] > best[static_cast<size_t>(b)];
  });
  order.resize(static_cast<size_t>(std::min(rows, request.top_k)));
  for (const int64_t j : order) result.ids.push_back(request.zone.begin + j);
  for (int64_t h = 0; h < request.group; ++h) {
    for (const int64_t j : order)
      result.scores.push_back(scores[static_cast<size_t>(h * rows + j)]);
  }
  return result;
}

inline double Recall(const SearchResult& found, const SearchResult& exact) {
  const std::set<Position> truth(exact.ids.begin(), exact.ids.end());
  const auto hits = std::count_if(found.ids.begin(), found.ids.end(),
                                  [&truth](Position id) { return truth.count(id) > 0; });
  return static_cast<double>(hits) / static_cast<double>(std::max<size_t>(truth.size(), 1));
}

// Queries like those of MakeQueries at evenly spread positions.
inline SampledQueries MakeSampledQueries(std::mt19937_64& rng, const KeySet& keys, int64_t group,
                                         int64_t samples) {
  SampledQueries sampled{.group = group, .head_dim = keys.head_dim};
  samples = std::min(samples, keys.count);
  for (int64_t i = 0; i < samples; ++i) {
    sampled.positions.push_back((2 * i + 1) * keys.count / (2 * samples));
    const std::vector<float> queries = MakeQueries(rng, keys, group);
    sampled.queries.insert(sampled.queries.end(), queries.begin(), queries.end());
  }
  return sampled;
}

// Rows of the zone, each once, ordered by a group score of some lse, and exactly scored.
inline void ExpectValid(const KeySet& keys, const SearchRequest& request,
                        const SearchResult& result) {
  const size_t found = result.ids.size();
  EXPECT_LE(static_cast<int64_t>(found), request.top_k);
  EXPECT_EQ(std::set<Position>(result.ids.begin(), result.ids.end()).size(), found);
  ASSERT_EQ(result.scores.size(), found * static_cast<size_t>(request.group));
  ASSERT_EQ(static_cast<int64_t>(result.zone_lse.size()), request.group);
  std::vector<float> score(static_cast<size_t>(request.group));
  float before = INFINITY;
  for (size_t i = 0; i < found; ++i) {
    EXPECT_GE(result.ids[i], request.zone.begin);
    ASSERT_LT(result.ids[i], request.zone.end);
    kernels::DotScore(request.queries, request.group, keys.head_dim, keys.Row(result.ids[i]), 1,
                      request.scale, score.data(), 1);
    float best = -INFINITY;
    for (size_t h = 0; h < score.size(); ++h) {
      EXPECT_EQ(result.scores[h * found + i], score[h]);
      best = std::max(best, score[h] - result.zone_lse[h]);
    }
    EXPECT_LE(best, before);
    if (best == before) {
      EXPECT_LT(result.ids[i - 1], result.ids[i]);
    }
    before = best;
  }
}

}  // namespace carrel::kvstore
