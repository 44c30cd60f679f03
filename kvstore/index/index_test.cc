#include "kvstore/index/index.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <set>
#include <thread>

#include "common/test_util.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kvstore/index/index_test_checks.h"
#include "kvstore/index/index_test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

TEST(IndexParamsTest, ParseIndexKind_RoundTripsAndListsKinds) {
  EXPECT_EQ(*ParseIndexKind("flat"), IndexKind::kFlat);
  EXPECT_EQ(*ParseIndexKind("hnsw"), IndexKind::kHnsw);
  EXPECT_THAT(ParseIndexKind("tree"), StatusIs(StatusCode::kInvalidArgument,
                                               "\"tree\" is unknown, must be one of flat, code"));
}

TEST(IndexParamsTest, ValidateIndexParams_OutOfBounds_NamesFieldValueAndBounds) {
  const auto check = [](IndexParams params) {
    params.kind = IndexKind::kHnsw;
    return ValidateIndexParams(params);
  };
  CARREL_EXPECT_OK(check({}));
  EXPECT_THAT(check({.m = 3}), StatusIs(StatusCode::kInvalidArgument, "m=3, must be 4 .. 64"));
  EXPECT_THAT(check({.m = 65}), StatusIs(StatusCode::kInvalidArgument, "m=65"));
  EXPECT_THAT(check({.m = 32, .ef_construction = 31}),
              StatusIs(StatusCode::kInvalidArgument, "ef_construction=31, must be 32 .. 4096"));
  EXPECT_THAT(check({.effort = -1}),
              StatusIs(StatusCode::kInvalidArgument, "effort=-1, must be 0 .. 65536"));
}

TEST(FlatIndexTest, RandomShapesAndZones_EqualTheDefinitionExactly) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 60; ++round) {
    const auto rows = static_cast<int64_t>(rng() % (round % 10 == 0 ? 20000 : 700));
    const int64_t head_dims[] = {8, 64, 80, 128, 33};
    const KeySet keys = MakeKeys(rng, rows, head_dims[rng() % 5]);
    const auto group = static_cast<int64_t>(1 + rng() % 8);
    const std::vector<float> queries = MakeQueries(rng, keys, group);
    const auto begin = static_cast<Position>(rng() % static_cast<uint64_t>(rows + 1));
    const RowRange zone =
        round % 3 == 0
            ? RowRange{0, rows}
            : RowRange{begin, begin + static_cast<Position>(
                                          rng() % static_cast<uint64_t>(rows - begin + 1))};
    const int64_t top_ks[] = {0, 1, 17, 128, zone.rows(), zone.rows() + 5};
    const SearchRequest request{.queries = queries.data(),
                                .group = group,
                                .scale = 0.125f,
                                .zone = zone,
                                .top_k = top_ks[rng() % 6]};
    const MemoryContext context(keys, static_cast<int64_t>(1 + rng() % 300));
    const auto stored = Rows::OpenKeys(context, Layer(0), KvHead(0));
    CARREL_ASSERT_OK(stored);
    const SearchResult expected = BruteForce(keys, request);
    for (const Rows& source : {keys.AsRows(), *stored}) {
      const SearchResult result = MustSearch(*MustBuild({}, source), request);
      EXPECT_EQ(result.ids, expected.ids);
      EXPECT_EQ(result.scores, expected.scores);
      EXPECT_EQ(result.zone_lse, expected.zone_lse);
      EXPECT_EQ(result.visited, group * zone.rows());
    }
  }
}

TEST(FlatIndexTest, EqualKeys_TiesGoToTheSmallerId) {
  KeySet keys{.count = 300, .head_dim = 16, .keys = std::vector<uint16_t>(300 * 16, 0x3f80)};
  const std::vector<float> queries(16, 1.0f);
  const SearchResult result =
      MustSearch(*MustBuild({}, keys.AsRows()),
                 {.queries = queries.data(), .group = 1, .scale = 1, .zone = {7, 300}, .top_k = 4});
  EXPECT_THAT(result.ids, testing::ElementsAre(7, 8, 9, 10));
}

TEST(FlatIndexTest, FlippedBit_InsideTheZoneIsDataLossOutsideIsNot) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 1000, 64);
  MemoryContext context(keys, 1000);
  context.value(0)[500 * 128] ^= 1;
  const auto index = MustBuild({}, *Rows::OpenKeys(context, Layer(0), KvHead(0)));
  const std::vector<float> queries = MakeQueries(rng, keys, 2);
  SearchRequest request{
      .queries = queries.data(), .group = 2, .scale = 1, .zone = {0, 400}, .top_k = 5};
  EXPECT_EQ(MustSearch(*index, request).ids, BruteForce(keys, request).ids);
  request.zone = {0, 1000};
  SearchScratch scratch;
  SearchResult result;
  EXPECT_THAT(index->Search(request, scratch, result),
              StatusIs(StatusCode::kDataLoss, "K rows, layer 0, kv_head 0, segment 0"));
}

class AnyIndexTest : public testing::TestWithParam<IndexKind> {
 protected:
  // With what the kind needs, and little effort, so that few searches score a whole zone.
  IndexParams Params() const {
    IndexParams params{.kind = GetParam(), .m = 8, .ef_construction = 40};
    params.effort = GetParam() == IndexKind::kIvf ? 4 : 32;
    return params;
  }
  std::string BuildBlob(std::mt19937_64& rng, const KeySet& keys) const {
    const SampledQueries sampled = MakeSampledQueries(rng, keys, 2, 64);
    const auto blob = BuildIndex(Params(), keys.AsRows(), &sampled);
    CARREL_EXPECT_OK(blob);
    return *blob;
  }
  std::unique_ptr<Index> Build(std::mt19937_64& rng, const KeySet& keys) const {
    auto index = OpenIndex(Params(), BuildBlob(rng, keys), keys.AsRows());
    CARREL_EXPECT_OK(index);
    return *std::move(index);
  }
};

TEST_P(AnyIndexTest, BadRequests_AreInvalidArgumentAndNameTheField) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 100, 16);
  const std::vector<float> queries = MakeQueries(rng, keys, 1);
  const auto index = Build(rng, keys);
  const auto search = [&](auto edit) {
    SearchRequest request{
        .queries = queries.data(), .group = 1, .scale = 1, .zone = {0, 100}, .top_k = 5};
    edit(request);
    SearchScratch scratch;
    SearchResult result;
    return index->Search(request, scratch, result);
  };
  CARREL_EXPECT_OK(search([](SearchRequest&) {}));
  const auto invalid = StatusCode::kInvalidArgument;
  EXPECT_THAT(search([](SearchRequest& r) { r.group = 0; }), StatusIs(invalid, "group=0"));
  EXPECT_THAT(search([](SearchRequest& r) { r.queries = nullptr; }), StatusIs(invalid, "queries"));
  EXPECT_THAT(search([](SearchRequest& r) { r.scale = 0; }), StatusIs(invalid, "scale=0"));
  EXPECT_THAT(search([](SearchRequest& r) { r.scale = NAN; }), StatusIs(invalid, "scale=nan"));
  EXPECT_THAT(search([](SearchRequest& r) { r.top_k = -1; }), StatusIs(invalid, "top_k=-1"));
  EXPECT_THAT(search([](SearchRequest& r) {
                r.zone = {0, 101};
              }),
              StatusIs(invalid, "zone [0, 101) of 100 rows"));
  EXPECT_THAT(search([](SearchRequest& r) { r.zone = {5, 4}; }), StatusIs(invalid, "zone [5, 4)"));
  EXPECT_THAT(search([](SearchRequest& r) { r.effort = 65537; }),
              StatusIs(invalid, "effort=65537"));
}

TEST_P(AnyIndexTest, TopKOfTheWholeZone_ReturnsEveryRowOnceAndExactScores) {
  std::mt19937_64 rng(TestSeed());
  for (const int64_t rows : {0, 1, 2, 5, 40, 1500}) {
    const KeySet keys = MakeKeys(rng, rows, 32);
    const std::vector<float> queries = MakeQueries(rng, keys, 3);
    const auto index = Build(rng, keys);
    for (const RowRange zone : {RowRange{0, rows}, RowRange{rows / 4, rows - rows / 3}}) {
      const SearchRequest request{
          .queries = queries.data(), .group = 3, .scale = 0.2f, .zone = zone, .top_k = rows + 1};
      const SearchResult result = MustSearch(*index, request);
      const SearchResult expected = BruteForce(keys, request);
      EXPECT_EQ(result.ids, expected.ids);
      EXPECT_EQ(result.scores, expected.scores);
    }
  }
}

// By id: the rows of `best_first` with their scores, and the group score of its last.
void ExpectSameRows(const SearchResult& by_id, const SearchResult& best_first) {
  const size_t rows = best_first.ids.size();
  ASSERT_EQ(by_id.ids.size(), rows);
  EXPECT_TRUE(std::is_sorted(by_id.ids.begin(), by_id.ids.end()));
  EXPECT_EQ(by_id.zone_lse, best_first.zone_lse);
  float last = -INFINITY;
  for (size_t h = 0; rows > 0 && h < best_first.zone_lse.size(); ++h) {
    last = std::max(last, best_first.scores[(h + 1) * rows - 1] - best_first.zone_lse[h]);
  }
  if (rows > 0) {
    EXPECT_EQ(by_id.least, last);
    EXPECT_EQ(best_first.least, last);
  }
  for (size_t i = 0; i < rows; ++i) {
    const auto found = std::lower_bound(by_id.ids.begin(), by_id.ids.end(), best_first.ids[i]);
    ASSERT_TRUE(found != by_id.ids.end() && *found == best_first.ids[i]);
    const auto at = static_cast<size_t>(found - by_id.ids.begin());
    for (size_t h = 0; h < best_first.zone_lse.size(); ++h) {
      ASSERT_EQ(by_id.scores[h * rows + at], best_first.scores[h * rows + i]);
    }
  }
}

TEST_P(AnyIndexTest, RandomShapesAndZones_ResultsAreUniqueInTheZoneAndExactlyScored) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 12; ++round) {
    const auto rows = static_cast<int64_t>(1 + rng() % 5000);
    const int64_t head_dims[] = {8, 64, 80, 128, 33};
    const KeySet keys = MakeKeys(rng, rows, head_dims[rng() % 5]);
    const auto index = Build(rng, keys);
    SearchScratch scratch;
    for (int64_t group = 1; group <= 8; ++group) {
      const std::vector<float> queries = MakeQueries(rng, keys, group);
      const auto begin = static_cast<Position>(rng() % static_cast<uint64_t>(rows));
      const auto length = static_cast<Position>(rng() % static_cast<uint64_t>(rows - begin + 1));
      const int64_t top_ks[] = {0, 1, 17, 128, length, length + 5};
      SearchRequest request{
          .queries = queries.data(),
          .group = group,
          .scale = 0.125f,
          .zone = group % 2 == 0 ? RowRange{0, rows} : RowRange{begin, begin + length},
          .top_k = top_ks[rng() % 6]};
      SearchResult by_id, result;
      request.by_id = true;
      CARREL_ASSERT_OK(index->Search(request, scratch, by_id));
      request.by_id = false;
      CARREL_ASSERT_OK(index->Search(request, scratch, result));
      ExpectValid(keys, request, result);
      ExpectSameRows(by_id, result);
      const SearchResult exact = BruteForce(keys, request);
      EXPECT_LE(result.ids.size(), exact.ids.size());
      if (GetParam() != IndexKind::kHnsw && GetParam() != IndexKind::kGraph) {
        EXPECT_EQ(result.ids.size(), exact.ids.size());
      }
      for (size_t h = 0; h < exact.zone_lse.size() && request.zone.rows() > 0; ++h) {
        if (result.zone_scored) {
          EXPECT_EQ(result.zone_lse[h], exact.zone_lse[h]);
        } else {
          EXPECT_TRUE(std::isfinite(result.zone_lse[h]));
        }
      }
    }
  }
}

TEST_P(AnyIndexTest, Build_Twice_GivesTheSameBytes) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 1500, 32);
  const MemoryContext context(keys, 400);
  const auto stored = Rows::OpenKeys(context, Layer(0), KvHead(0));
  CARREL_ASSERT_OK(stored);
  const SampledQueries sampled = MakeSampledQueries(rng, keys, 3, 50);
  const auto first = BuildIndex(Params(), keys.AsRows(), &sampled);
  const auto second = BuildIndex(Params(), *stored, &sampled);
  CARREL_ASSERT_OK(first);
  CARREL_ASSERT_OK(second);
  EXPECT_TRUE(*first == *second);
}

TEST_P(AnyIndexTest, Search_FromManyThreads_EqualsAlone) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 3000, 32);
  const MemoryContext context(keys, 512);
  const std::string blob = BuildBlob(rng, keys);
  const auto alone = *OpenIndex(Params(), blob, keys.AsRows());
  const auto shared = *OpenIndex(Params(), blob, *Rows::OpenKeys(context, Layer(0), KvHead(0)));
  std::vector<std::thread> threads;
  std::atomic<int> different = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, seed = rng()] {
      std::mt19937_64 own(seed);
      SearchScratch scratch;
      SearchResult result;
      for (int i = 0; i < 20; ++i) {
        const std::vector<float> queries = MakeQueries(own, keys, 2);
        const SearchRequest request{
            .queries = queries.data(), .group = 2, .scale = 1, .zone = {10, 2990}, .top_k = 20};
        SearchScratch fresh;
        SearchResult expected;
        if (!shared->Search(request, scratch, result).ok() ||
            !alone->Search(request, fresh, expected).ok() || result.ids != expected.ids ||
            result.scores != expected.scores || result.zone_lse != expected.zone_lse) {
          ++different;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(different, 0);
}

TEST_P(AnyIndexTest, Open_OverOtherRows_IsRefused) {
  if (GetParam() == IndexKind::kFlat) GTEST_SKIP() << "has no blob";
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 500, 32);
  const KeySet others = MakeKeys(rng, 500, 32);
  const KeySet more = MakeKeys(rng, 501, 32);
  const std::string blob = BuildBlob(rng, keys);
  EXPECT_THAT(OpenIndex(Params(), blob, others.AsRows()),
              StatusIs(StatusCode::kDataLoss, "over other rows"));
  EXPECT_THAT(OpenIndex(Params(), blob, more.AsRows()),
              StatusIs(StatusCode::kInvalidArgument, "500 rows of 32, not 501 of 32"));
}

INSTANTIATE_TEST_SUITE_P(Kinds, AnyIndexTest, testing::ValuesIn(kAllIndexKinds),
                         [](const auto& info) { return std::string(IndexKindName(info.param)); });

TEST(HnswIndexTest, Results_AreUniqueInTheZoneOrderedAndExactlyScored) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 4000, 64);
  const auto index = MustBuild({.kind = IndexKind::kHnsw, .effort = 64}, keys.AsRows());
  for (int round = 0; round < 20; ++round) {
    const auto group = static_cast<int64_t>(1 + rng() % 4);
    const std::vector<float> queries = MakeQueries(rng, keys, group);
    const auto begin = static_cast<Position>(rng() % 1500);
    const SearchRequest request{.queries = queries.data(),
                                .group = group,
                                .scale = 0.125f,
                                .zone = {begin, begin + 2000 + static_cast<Position>(rng() % 500)},
                                .top_k = static_cast<int64_t>(1 + rng() % 100)};
    const SearchResult result = MustSearch(*index, request);
    ASSERT_EQ(static_cast<int64_t>(result.ids.size()), request.top_k);
    EXPECT_EQ(std::set<Position>(result.ids.begin(), result.ids.end()).size(), result.ids.size());
    EXPECT_FALSE(result.zone_scored);
    EXPECT_EQ(static_cast<int64_t>(result.zone_lse.size()), group);
    EXPECT_GT(result.visited, 0);
    for (size_t i = 0; i < result.ids.size(); ++i) {
      EXPECT_GE(result.ids[i], request.zone.begin);
      EXPECT_LT(result.ids[i], request.zone.end);
      for (int64_t h = 0; h < group; ++h) {
        float score = 0;
        kernels::DotScore(queries.data() + h * 64, 1, 64, keys.Row(result.ids[i]), 1, request.scale,
                          &score, 1);
        EXPECT_EQ(result.scores[static_cast<size_t>(h) * result.ids.size() + i], score);
      }
      if (group == 1 && i > 0) {
        EXPECT_LE(result.scores[i], result.scores[i - 1]);
      }
    }
  }
}

TEST(HnswIndexTest, Recall_DoesNotFallAsEffortRises) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 6000, 64);
  const auto index = MustBuild({.kind = IndexKind::kHnsw}, keys.AsRows());
  constexpr int kRounds = 40;
  std::vector<double> recalls;
  for (const int32_t ef : {32, 64, 128, 512, 1400}) {
    std::mt19937_64 queries_rng(7);
    double sum = 0;
    for (int round = 0; round < kRounds; ++round) {
      const std::vector<float> queries = MakeQueries(queries_rng, keys, 2);
      const SearchRequest request{.queries = queries.data(),
                                  .group = 2,
                                  .scale = 0.125f,
                                  .zone = {4, 5900},
                                  .top_k = 32,
                                  .effort = ef};
      sum += Recall(MustSearch(*index, request), BruteForce(keys, request)) / kRounds;
    }
    recalls.push_back(sum);
    std::cout << "effort=" << ef << " recall@32=" << sum << "\n";
  }
  // Averaged over 40 queries of 32 rows, one row more or less is noise.
  for (size_t i = 1; i < recalls.size(); ++i) EXPECT_GE(recalls[i], recalls[i - 1] - 0.005);
  EXPECT_GT(recalls[2], 0.85);
  EXPECT_GT(recalls.back(), 0.95);
}

TEST(HnswIndexTest, Build_Twice_GivesTheSameBytes) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 1500, 32);
  const IndexParams params{.kind = IndexKind::kHnsw, .m = 8, .ef_construction = 40};
  const MemoryContext context(keys, 400);
  const auto first = BuildIndex(params, keys.AsRows());
  const auto second = BuildIndex(params, *Rows::OpenKeys(context, Layer(0), KvHead(0)));
  CARREL_ASSERT_OK(first);
  CARREL_ASSERT_OK(second);
  EXPECT_TRUE(*first == *second);
  EXPECT_LT(first->size(), 64u + 1500 * (8 * 8 + 12));
}

TEST(HnswIndexTest, FlippedBits_InTouchedRows_AreDataLoss) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 4000, 64);
  const IndexParams params{.kind = IndexKind::kHnsw, .m = 8, .ef_construction = 40, .effort = 32};
  const auto blob = *BuildIndex(params, keys.AsRows());
  const std::vector<float> queries = MakeQueries(rng, keys, 1);
  const SearchRequest request{
      .queries = queries.data(), .group = 1, .scale = 1, .zone = {0, 4000}, .top_k = 10};
  const SearchResult intact = MustSearch(**OpenIndex(params, blob, keys.AsRows()), request);
  MemoryContext context(keys, 4096);
  context.value(0)[static_cast<size_t>(intact.ids[0]) * 128 + 5] ^= 16;
  const auto rows = Rows::OpenKeys(context, Layer(0), KvHead(0));
  CARREL_ASSERT_OK(rows);
  const auto index = OpenIndex(params, blob, *rows);
  SearchScratch scratch;
  SearchResult result;
  // The row may be one that opening already looks at.
  EXPECT_THAT(index.ok() ? (*index)->Search(request, scratch, result) : index.status(),
              StatusIs(StatusCode::kDataLoss, "K rows, layer 0, kv_head 0, segment 0"));
  EXPECT_THAT(BuildIndex(params, *rows), StatusIs(StatusCode::kDataLoss, "segment 0"));
}

TEST(HnswIndexTest, Open_OverOtherRowsOrParams_IsRefused) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 500, 32);
  const KeySet others = MakeKeys(rng, 500, 32);
  const KeySet more = MakeKeys(rng, 501, 32);
  IndexParams params{.kind = IndexKind::kHnsw, .m = 8, .ef_construction = 40};
  const auto blob = *BuildIndex(params, keys.AsRows());
  CARREL_EXPECT_OK(OpenIndex(params, blob, keys.AsRows()));
  EXPECT_THAT(OpenIndex(params, blob, others.AsRows()),
              StatusIs(StatusCode::kDataLoss, "over other rows"));
  EXPECT_THAT(OpenIndex(params, blob, more.AsRows()),
              StatusIs(StatusCode::kInvalidArgument, "500 rows of 32, not 501 of 32"));
  params.m = 16;
  EXPECT_THAT(OpenIndex(params, blob, keys.AsRows()),
              StatusIs(StatusCode::kInvalidArgument, "m=8 ef_construction=40 levels=3, not m=16"));
  EXPECT_THAT(OpenIndex({}, blob, keys.AsRows()),
              StatusIs(StatusCode::kInvalidArgument, "flat has no blob"));
}

TEST(HnswIndexTest, Open_TruncatedBlob_IsDataLoss) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 60, 16);
  const IndexParams params{.kind = IndexKind::kHnsw, .m = 4, .ef_construction = 20};
  const auto blob = *BuildIndex(params, keys.AsRows());
  for (size_t size = 0; size < blob.size(); size += size < 70 ? 1 : 13) {
    EXPECT_THAT(OpenIndex(params, blob.substr(0, size), keys.AsRows()),
                StatusIs(StatusCode::kDataLoss, "hnsw blob"));
  }
  EXPECT_THAT(OpenIndex(params, blob + "1234", keys.AsRows()),
              StatusIs(StatusCode::kDataLoss, "header makes"));
}

}  // namespace
}  // namespace carrel::kvstore
