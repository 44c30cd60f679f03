#include "kvstore/index/int8/int8.h"

#include <cstring>

#include "common/checksum.h"
#include "common/test_util.h"
#include "kvstore/format/keys.h"
#include "kvstore/index/index_test_checks.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

constexpr IndexParams kInt8 = {.kind = IndexKind::kInt8};

TEST(Int8Layout, AnyShape_BlocksDoNotMeetNorCrossAChunk) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 200; ++round) {
    const auto rows = static_cast<int64_t>(rng() % 5000), d = static_cast<int64_t>(1 + rng() % 300);
    const int64_t chunk = 32768 << rng() % 3;
    const Int8Layout layout(rows, d, chunk);
    EXPECT_EQ(layout.blocks(), (rows + 15) / 16);
    int64_t end = 4096;
    for (int64_t block = 0; block < layout.blocks(); ++block) {
      const int64_t at = layout.Offset(block);
      ASSERT_GE(at, end);
      ASSERT_EQ(at / chunk, (at + layout.block_bytes() - 1) / chunk) << "block " << block;
      const int64_t next = block + layout.Contiguous(block);
      ASSERT_LE(next, layout.blocks());
      ASSERT_EQ(layout.Offset(next - 1), at + (next - 1 - block) * layout.block_bytes());
      end = at + layout.block_bytes();
    }
    EXPECT_EQ(layout.blob_bytes(), end);
  }
}

TEST(Int8Test, RandomShapesAndZones_RowsAreScoredExactlyAndNearlyAllFound) {
  std::mt19937_64 rng(TestSeed());
  double hits = 0, wanted = 0;
  for (int round = 0; round < 12; ++round) {
    const auto rows = static_cast<int64_t>(2000 + rng() % 3000);
    const int64_t head_dims[] = {16, 50, 64, 128};
    const KeySet keys = MakeKeys(rng, rows, head_dims[rng() % 4]);
    const auto index = MustBuild(kInt8, keys.AsRows());
    EXPECT_EQ(index->kind(), IndexKind::kInt8);
    for (int i = 0; i < 4; ++i) {
      const auto group = static_cast<int64_t>(1 + rng() % 9);
      const std::vector<float> queries = MakeQueries(rng, keys, group);
      const SearchRequest request{
          .queries = queries.data(),
          .group = group,
          .scale = 0.1f,
          .zone = {static_cast<Position>(rng() % 500), rows - static_cast<Position>(rng() % 500)},
          .top_k = static_cast<int64_t>(1 + rng() % 200)};
      const SearchResult found = MustSearch(*index, request);
      ExpectValid(keys, request, found);
      EXPECT_FALSE(found.zone_scored);
      const SearchResult exact = BruteForce(keys, request);
      ASSERT_EQ(found.ids.size(), exact.ids.size());
      const std::set<Position> best(exact.ids.begin(), exact.ids.end());
      for (const Position id : found.ids) hits += static_cast<double>(best.count(id));
      wanted += static_cast<double>(best.size());
      for (int64_t h = 0; h < group; ++h) {
        EXPECT_NEAR(found.zone_lse[h], exact.zone_lse[h], 0.1);
      }
      SearchRequest everything = request;
      everything.effort = 65536;
      const SearchResult all = MustSearch(*index, everything);
      // Rounding of the heads' lse may exchange rows of nearly equal scores, also the last one.
      EXPECT_GE(Recall(all, exact) * static_cast<double>(exact.ids.size()),
                static_cast<double>(exact.ids.size()) - 1.001);
      EXPECT_TRUE(all.zone_scored);
    }
  }
  std::cout << "recall " << hits / wanted << "\n";
  EXPECT_GT(hits / wanted, 0.99);
}

TEST(Int8Test, Blob_SameFromStoredSegmentsAndAnyDamageIsRefusedOrHarmless) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 3000, 32);
  const std::string blob = *BuildIndex(kInt8, keys.AsRows());
  const MemoryContext context(keys, 1024 + 7);  // a block lies in two segments
  EXPECT_EQ(blob, *BuildIndex(kInt8, *Rows::OpenKeys(context, Layer(0), KvHead(0))));
  const std::vector<float> queries = MakeQueries(rng, keys, 2);
  const SearchRequest request{
      .queries = queries.data(), .group = 2, .scale = 0.2f, .zone = {0, 3000}, .top_k = 20};
  for (int round = 0; round < 200; ++round) {
    std::string mutated = blob;
    const size_t at = round < 100 ? rng() % 64 : 4096 + rng() % (blob.size() - 4096);
    mutated[at] = static_cast<char>(mutated[at] ^ (1 << rng() % 8));
    if (round % 3 == 0) {  // also past the header's own CRC
      const uint32_t crc = Crc32c(mutated.substr(0, 60));
      std::memcpy(mutated.data() + 60, &crc, 4);
    }
    const auto index = OpenIndex(kInt8, mutated, keys.AsRows());
    if (!index.ok()) continue;
    // Whatever is found is of the zone and scored exactly.
    SearchScratch scratch;
    SearchResult result;
    CARREL_ASSERT_OK((*index)->Search(request, scratch, result));
    for (size_t i = 0; i < result.ids.size(); ++i) {
      ASSERT_TRUE(request.zone.begin <= result.ids[i] && result.ids[i] < request.zone.end);
    }
  }
  for (const size_t size : {size_t{0}, size_t{63}, size_t{64}, size_t{4096}, blob.size() - 1}) {
    EXPECT_THAT(OpenIndex(kInt8, blob.substr(0, size), keys.AsRows()),
                StatusIs(StatusCode::kDataLoss, "int8 blob"));
  }
  const KeySet others = MakeKeys(rng, 3000, 32);
  EXPECT_THAT(OpenIndex(kInt8, blob, others.AsRows()),
              StatusIs(StatusCode::kDataLoss, "over other rows"));
  const KeySet fewer = MakeKeys(rng, 2999, 32);
  EXPECT_THAT(OpenIndex(kInt8, blob, fewer.AsRows()),
              StatusIs(StatusCode::kInvalidArgument, "3000 rows"));
}

}  // namespace
}  // namespace carrel::kvstore
