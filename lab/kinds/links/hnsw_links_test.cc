#include "lab/kinds/links/hnsw_links.h"

#include "common/checksum.h"
#include "common/test_util.h"
#include "kvstore/format/little_endian.h"
#include "kvstore/index/index_test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;
using testing::ElementsAre;

// Three rows; row 2 is on two upper levels.
std::string SmallBlob() {
  const HnswLinks::Header header{.rows = 3,
                                 .head_dim = 8,
                                 .m = 1,
                                 .ef_construction = 5,
                                 .levels = 3,
                                 .entry = 2,
                                 .rows_crc = 0x01020304};
  const std::vector<int32_t> links[3][3] = {{{1, 2}}, {{0}}, {{0}, {2}, {}}};
  return HnswLinks::Encode(
      header,
      [&links](int64_t row, int32_t level) -> absl::Span<const int32_t> {
        return links[row][level];
      },
      [](int64_t row) { return row == 2 ? 3 : 1; });
}

TEST(HnswLinksTest, Encode_SmallGraph_HasGoldenBytesBehindTheHeader) {
  const std::string blob = SmallBlob();
  std::string expected;
  for (const int32_t word : {1, 2, 0, -1, 0, -1,  // level 0
                             2, 2,                // row 2 on 2 upper levels
                             2, -1}) {            // its lists
    AppendLittleEndian(expected, word);
  }
  ASSERT_EQ(blob.size(), 64 + expected.size());
  EXPECT_EQ(blob.substr(0, 8), std::string("CHNS\1\0\0\0", 8));
  EXPECT_EQ(LoadLittleEndian<uint64_t>(blob.data() + 8), 3u);
  EXPECT_EQ(LoadLittleEndian<uint32_t>(blob.data() + 36), 0x01020304u);
  EXPECT_EQ(LoadLittleEndian<uint32_t>(blob.data() + 60), Crc32c(blob.substr(0, 60)));
  EXPECT_EQ(blob.substr(64), expected);
}

TEST(HnswLinksTest, Open_OfEncoded_GivesTheLinksAlsoAfterAMove) {
  HnswLinks opened = *HnswLinks::Open(SmallBlob());
  const HnswLinks links = std::move(opened);
  EXPECT_EQ(links.header().entry, 2u);
  EXPECT_EQ(links.header().levels, 3);
  EXPECT_THAT(links.Level0(0), ElementsAre(1, 2));
  EXPECT_THAT(links.Level0(1), ElementsAre(0, -1));
  EXPECT_THAT(links.Upper(2, 1), ElementsAre(2));
  EXPECT_THAT(links.Upper(2, 2), ElementsAre(-1));
  EXPECT_THAT(links.Upper(2, 3), ElementsAre());
  EXPECT_THAT(links.Upper(0, 1), ElementsAre());
}

TEST(HnswLinksTest, Open_AnotherVersion_IsFailedPreconditionNamingBoth) {
  std::string blob = SmallBlob();
  blob[4] = 9;
  const uint32_t crc = Crc32c(blob.substr(0, 60));
  std::memcpy(blob.data() + 60, &crc, 4);
  EXPECT_THAT(HnswLinks::Open(blob),
              StatusIs(StatusCode::kFailedPrecondition, "version 9, this program reads version 1"));
}

TEST(HnswLinksTest, Open_LinkOutsideTheRows_IsDataLoss) {
  for (const int32_t link : {3, -2, INT32_MAX, INT32_MIN}) {
    std::string blob = SmallBlob();
    std::memcpy(blob.data() + 64 + 4, &link, 4);
    EXPECT_THAT(HnswLinks::Open(blob), StatusIs(StatusCode::kDataLoss, "links of row 0"));
  }
  std::string blob = SmallBlob();
  blob[blob.size() - 8] = 77;
  EXPECT_THAT(HnswLinks::Open(blob), StatusIs(StatusCode::kDataLoss, "upper list 0"));
}

// Damage that the CRC of the header does not see, and header fields with a right CRC.
TEST(HnswLinksTest, MutatedBlobs_NeverCrashOpeningOrSearching) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 300, 16);
  const IndexParams params{.kind = IndexKind::kHnsw, .m = 4, .ef_construction = 20, .effort = 10};
  const auto blob = BuildIndex(params, keys.AsRows());
  CARREL_ASSERT_OK(blob);
  const std::vector<float> queries = MakeQueries(rng, keys, 2);
  int opened = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string mutated = *blob;
    const size_t region = round % 3 == 0 ? 64 : mutated.size();
    for (uint64_t edits = 1 + rng() % 4; edits > 0; --edits) {
      mutated[rng() % region] = static_cast<char>(round % 2 == 0 ? rng() : rng() % 3);
    }
    if (round % 5 == 0) mutated.resize(rng() % (mutated.size() + 1));
    if (mutated.size() >= 64) {
      const uint32_t crc = Crc32c(mutated.substr(0, 60));
      std::memcpy(mutated.data() + 60, &crc, 4);
    }
    const auto index = OpenIndex(params, mutated, keys.AsRows());
    if (!index.ok()) continue;
    ++opened;
    SearchScratch scratch;
    SearchResult result;
    CARREL_EXPECT_OK((*index)->Search(
        {.queries = queries.data(), .group = 2, .scale = 1, .zone = {5, 295}, .top_k = 8}, scratch,
        result));
    for (const Position id : result.ids) EXPECT_TRUE(id >= 5 && id < 295);
  }
  EXPECT_GT(opened, 50) << "some mutations leave a valid graph";
}

TEST(HnswLinksTest, RandomGarbage_IsDataLoss) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 2000; ++round) {
    std::string bytes(rng() % 300, '\0');
    for (char& c : bytes) c = static_cast<char>(rng());
    if (bytes.size() >= 64) bytes.replace(0, 8, std::string("CHNS\1\0\0\0", 8));
    EXPECT_EQ(HnswLinks::Open(bytes).status().code(), StatusCode::kDataLoss);
  }
}

}  // namespace
}  // namespace carrel::kvstore
