#include "kvstore/index/int8_scan.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "common/test_util.h"
#include "common/thread_pool.h"
#include "kernels/score/int8_score/int8_score.h"
#include "kvstore/index/index_test_checks.h"
#include "kvstore/index/index_test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

std::unique_ptr<Int8Scan> Keeping(const Rows& rows) {
  const auto memory = Int8Memory::Make(1, rows.count(), rows.head_dim());
  return std::make_unique<Int8Scan>(rows, Int8Memory::Take(memory, 0));
}

std::unique_ptr<Int8Scan> NotKeeping(const Rows& rows) {
  return std::make_unique<Int8Scan>(rows, Int8Memory::Piece());
}

struct Case {
  KeySet keys;
  std::vector<float> queries;
  SearchRequest request;
};

// Of which a search scans in 8 bits; zones begin and end anywhere.
Case RandomCase(std::mt19937_64& rng, int64_t group) {
  static constexpr int64_t kHeadDims[] = {33, 64, 80, 96, 128, 256};
  Case c;
  c.keys = MakeKeys(rng, static_cast<int64_t>(1400 + rng() % 4000), kHeadDims[rng() % 6]);
  c.queries = MakeQueries(rng, c.keys, group);
  c.request = {.queries = c.queries.data(), .group = group, .scale = 0.125f};
  c.request.zone.begin = static_cast<Position>(rng() % 200);
  c.request.zone.end = c.keys.count - static_cast<Position>(rng() % 3 == 0 ? 0 : rng() % 150);
  const int64_t top_ks[] = {1, 17, c.request.zone.rows() / 8};
  c.request.top_k = top_ks[rng() % 3];
  return c;
}

void ExpectSame(const SearchResult& a, const SearchResult& b) {
  EXPECT_EQ(a.ids, b.ids);
  EXPECT_EQ(a.scores, b.scores);
  EXPECT_EQ(a.zone_lse, b.zone_lse);
  EXPECT_EQ(a.visited, b.visited);
  EXPECT_EQ(a.zone_scored, b.zone_scored);
}

TEST(Int8ScanTest, OneQHead_FindsTheRowsOfFlat) {
  std::mt19937_64 rng(TestSeed());
  int64_t left_out = 0;
  for (int round = 0; round < 30; ++round) {
    const Case c = RandomCase(rng, 1);
    const MemoryContext context(c.keys, static_cast<int64_t>(1 + rng() % 900));
    const auto stored = Rows::OpenKeys(context, Layer(0), KvHead(0));
    CARREL_ASSERT_OK(stored);
    const SearchResult expected = BruteForce(c.keys, c.request);
    const auto scan = round % 2 == 0 ? Keeping(*stored) : NotKeeping(*stored);
    for (int again = 0; again < 2; ++again) {
      const SearchResult result = MustSearch(*scan, c.request);
      EXPECT_EQ(result.ids, expected.ids);
      EXPECT_EQ(result.scores, expected.scores);
      EXPECT_FALSE(result.zone_scored);
      left_out += 2 * c.request.zone.rows() - result.visited;
    }
  }
  EXPECT_GT(left_out, 0);
}

// By how much lse in 8 bits is off, the order of a group's rows may be.
TEST(Int8ScanTest, Group_WhatIsReturnedIsNoWorseThanTheBoundSays) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 30; ++round) {
    const auto group = static_cast<int64_t>(1 + rng() % 8);
    const Case c = RandomCase(rng, group);
    const int64_t d = c.keys.head_dim, rows = c.request.zone.rows();
    const auto scan = Keeping(c.keys.AsRows());
    const SearchResult result = MustSearch(*scan, c.request);
    ExpectValid(c.keys, c.request, result);
    const SearchResult expected = BruteForce(c.keys, c.request);
    ASSERT_EQ(result.ids.size(), expected.ids.size());

    std::vector<float> scores(static_cast<size_t>(group * Int8Scan::Stride(c.request.zone)));
    std::vector<float> lse(static_cast<size_t>(group));
    kernels::Int8Error of_rows;
    CARREL_ASSERT_OK(scan->Score(c.queries.data(), group, c.request.scale, c.request.zone, nullptr,
                                 scores.data(), lse.data(), of_rows));
    EXPECT_EQ(lse, result.zone_lse);
    for (int64_t h = 0; h < group; ++h) {
      const float* const of_zone = &scores[static_cast<size_t>(
          h * Int8Scan::Stride(c.request.zone) + Int8Scan::Offset(c.request.zone))];
      const double of_rounding = 0x1p-23 * std::abs(lse[static_cast<size_t>(h)]);
      EXPECT_NEAR(lse[static_cast<size_t>(h)], kernels::RefLogSumExp(of_zone, rows),
                  1e-5 + of_rounding);
    }
    double off = 1e-4;  // rounding
    for (size_t h = 0; h < expected.zone_lse.size(); ++h) {
      const double of_head = std::abs(result.zone_lse[h] - expected.zone_lse[h]);
      EXPECT_LE(of_head, kernels::Int8ScoreError(of_rows, &c.queries[h * static_cast<size_t>(d)], d,
                                                 c.request.scale) +
                             1e-4);
      off = std::max(off, of_head);
    }
    const auto group_score = [&](const SearchResult& of, size_t i, const std::vector<float>& lse) {
      float best = -INFINITY;
      for (size_t h = 0; h < lse.size(); ++h) {
        best = std::max(best, of.scores[h * of.ids.size() + i] - lse[h]);
      }
      return best;
    };
    for (size_t i = 0; i < expected.ids.size(); ++i) {
      EXPECT_NEAR(group_score(result, i, expected.zone_lse),
                  group_score(expected, i, expected.zone_lse), 2 * off)
          << "place " << i;
    }
    // By the lse that is returned, nothing that is left out is better.
    SearchRequest all = c.request;
    all.top_k = rows;
    const SearchResult every = BruteForce(c.keys, all);
    const std::set<Position> found(result.ids.begin(), result.ids.end());
    const float last = group_score(result, result.ids.size() - 1, result.zone_lse);
    for (size_t i = 0; i < every.ids.size(); ++i) {
      if (found.count(every.ids[i]) > 0) continue;
      EXPECT_LE(group_score(every, i, result.zone_lse), last);
    }
  }
}

TEST(Int8ScanTest, Bits_DoNotDependOnWhatIsKeptThreadsOrOtherQueries) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    const auto group = static_cast<int64_t>(1 + rng() % 5);
    const Case c = RandomCase(rng, group);
    const MemoryContext context(c.keys, static_cast<int64_t>(1 + rng() % 900));
    const auto stored = Rows::OpenKeys(context, Layer(0), KvHead(0));
    CARREL_ASSERT_OK(stored);
    const SearchResult alone = MustSearch(*NotKeeping(c.keys.AsRows()), c.request);
    SearchRequest pooled = c.request;
    pooled.pool = &pool;
    ExpectSame(MustSearch(*NotKeeping(*stored), pooled), alone);
    const auto scan = Keeping(*stored);
    // Zones before it, so that some of its blocks are kept, from either side or none.
    for (int other = 0; other < 3; ++other) {
      SearchRequest before = other % 2 == 0 ? c.request : pooled;
      before.zone.begin = static_cast<Position>(rng() % 300);
      before.zone.end = before.zone.begin + 1024 +
                        static_cast<Position>(
                            rng() % static_cast<uint64_t>(c.keys.count - before.zone.begin - 1023));
      before.top_k = 5;
      ExpectSame(MustSearch(*scan, before), MustSearch(*NotKeeping(c.keys.AsRows()), before));
      ExpectSame(MustSearch(*scan, c.request), alone);
      ExpectSame(MustSearch(*scan, pooled), alone);
    }
    // Scored together with other tokens' queries.
    const auto tokens = static_cast<int64_t>(1 + rng() % 20),
               mine = static_cast<int64_t>(rng() % tokens);
    std::vector<float> queries;
    for (int64_t token = 0; token < tokens; ++token) {
      const std::vector<float> q = token == mine ? c.queries : MakeQueries(rng, c.keys, group);
      queries.insert(queries.end(), q.begin(), q.end());
    }
    const int64_t stride = Int8Scan::Stride(c.request.zone);
    std::vector<float> scores(static_cast<size_t>(tokens * group * stride));
    std::vector<float> lse(static_cast<size_t>(tokens * group));
    Int8ZoneScores together;
    CARREL_ASSERT_OK(scan->Score(queries.data(), tokens * group, c.request.scale, c.request.zone,
                                 &pool, scores.data(), lse.data(), together.error));
    together.stride = stride;
    together.lse = &lse[mine * group];
    together.scores = scores.data() + mine * group * stride + Int8Scan::Offset(c.request.zone);
    SearchRequest given = c.request;
    given.int8_scores = &together;
    ExpectSame(MustSearch(*scan, given), alone);
    ExpectSame(MustSearch(*NotKeeping(*stored), given), alone);
  }
}

TEST(Int8ScanTest, EqualKeys_TiesGoToTheSmallerId) {
  KeySet keys{.count = 3000, .head_dim = 16, .keys = std::vector<uint16_t>(3000 * 16, 0x3f80)};
  const std::vector<float> queries(16, 1.0f);
  const SearchResult result = MustSearch(
      *Keeping(keys.AsRows()),
      {.queries = queries.data(), .group = 1, .scale = 1, .zone = {7, 3000}, .top_k = 4});
  EXPECT_THAT(result.ids, testing::ElementsAre(7, 8, 9, 10));
  EXPECT_FALSE(result.zone_scored);
}

TEST(Int8ScanTest, SmallZonesLargeTopKAndExactLse_AreScannedAsStored) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 3000, 64);
  const std::vector<float> queries = MakeQueries(rng, keys, 3);
  const auto scan = Keeping(keys.AsRows());
  SearchRequest request{
      .queries = queries.data(), .group = 3, .scale = 0.125f, .zone = {0, 3000}, .top_k = 20};
  const auto expect_stored = [&](const SearchRequest& stored) {
    const SearchResult result = MustSearch(*scan, stored), expected = BruteForce(keys, stored);
    EXPECT_TRUE(result.zone_scored);
    EXPECT_EQ(result.ids, expected.ids);
    EXPECT_EQ(result.scores, expected.scores);
    EXPECT_EQ(result.zone_lse, expected.zone_lse);
  };
  EXPECT_FALSE(MustSearch(*scan, request).zone_scored);
  SearchRequest other = request;
  other.exact_lse = true;
  expect_stored(other);
  other = request;
  other.zone = {100, 1000};
  expect_stored(other);
  for (const int64_t top_k : {0, 376, 3000, 3005}) {
    other = request;
    other.top_k = top_k;
    expect_stored(other);
  }
}

TEST(Int8ScanTest, FlippedBit_InsideTheZoneIsDataLossOutsideIsNotAndNothingOfItIsKept) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 6000, 64);
  MemoryContext context(keys, 6000);
  const std::vector<float> queries = MakeQueries(rng, keys, 2);
  SearchRequest request{
      .queries = queries.data(), .group = 2, .scale = 1, .zone = {0, 1100}, .top_k = 5};
  const auto scan = Keeping(*Rows::OpenKeys(context, Layer(0), KvHead(0)));
  const size_t at = 3000 * 128 + 9;
  context.value(0)[at] ^= 16;
  SearchScratch scratch;
  SearchResult result;
  // Chunks are of 64 KiB: the first three hold no damage.
  ExpectSame(MustSearch(*scan, request), MustSearch(*NotKeeping(keys.AsRows()), request));
  request.zone = {0, 5900};
  for (int again = 0; again < 2; ++again) {
    EXPECT_THAT(scan->Search(request, scratch, result),
                StatusIs(StatusCode::kDataLoss, "K rows, layer 0, kv_head 0, segment 0"));
  }
  context.value(0)[at] ^= 16;
  ExpectSame(MustSearch(*scan, request), MustSearch(*NotKeeping(keys.AsRows()), request));
}

TEST(Int8ScanTest, FromManyThreads_EqualsAlone) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 4000, 64);
  const MemoryContext context(keys, 512);
  const auto shared = Keeping(*Rows::OpenKeys(context, Layer(0), KvHead(0)));
  const auto alone = NotKeeping(keys.AsRows());
  ThreadPool pool(2);
  std::vector<std::thread> threads;
  std::atomic<int> different = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, seed = rng()] {
      std::mt19937_64 own(seed);
      SearchScratch scratch, fresh;
      SearchResult result, expected;
      for (int i = 0; i < 20; ++i) {
        const std::vector<float> queries = MakeQueries(own, keys, 2);
        const auto begin = static_cast<Position>(own() % 900);
        SearchRequest request{.queries = queries.data(),
                              .group = 2,
                              .scale = 1,
                              .zone = {begin, 3000 + static_cast<Position>(own() % 1000)},
                              .top_k = 20};
        const bool expects = alone->Search(request, fresh, expected).ok();
        request.pool = i % 2 == 0 ? &pool : nullptr;
        if (!expects || !shared->Search(request, scratch, result).ok() ||
            result.ids != expected.ids || result.scores != expected.scores ||
            result.zone_lse != expected.zone_lse || result.visited != expected.visited) {
          ++different;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(different, 0);
}

TEST(Int8MemoryTest, Piece_IsOneAtATimeAndZeroAgainWhenItWasGivenBack) {
  EXPECT_EQ(Int8Memory::Make(3, 0, 64), nullptr);
  const auto memory = Int8Memory::Make(3, 1000, 64);
  ASSERT_NE(memory, nullptr);
  EXPECT_GE(memory->piece_bytes(), 63 * kernels::Int8BlockBytes(64));
  {
    const Int8Memory::Piece first = Int8Memory::Take(memory, 1);
    const Int8Memory::Piece second = Int8Memory::Take(memory, 2);
    ASSERT_FALSE(first.empty());
    ASSERT_FALSE(second.empty());
    EXPECT_EQ(second.data() - first.data(), memory->piece_bytes());
    std::fill_n(first.data(), memory->piece_bytes(), uint8_t{1});
    EXPECT_TRUE(Int8Memory::Take(memory, 1).empty());
  }
  const Int8Memory::Piece again = Int8Memory::Take(memory, 1);
  ASSERT_FALSE(again.empty());
  EXPECT_EQ(std::count(again.data(), again.data() + memory->piece_bytes(), 0),
            memory->piece_bytes());
  EXPECT_TRUE(Int8Memory::Take(nullptr, 0).empty());
}

TEST(Int8MemoryTest, ResidentBytes_AreThoseOfThePiece) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 2000, 64);
  EXPECT_EQ(NotKeeping(keys.AsRows())->resident_bytes(), 0);
  EXPECT_NEAR(static_cast<double>(Keeping(keys.AsRows())->resident_bytes()), 2000 * 68.5, 600);
}

}  // namespace
}  // namespace carrel::kvstore
