#include "lab/kinds/ivf/ivf.h"

#include <cstring>

#include "common/checksum.h"
#include "common/test_util.h"
#include "kvstore/index/index_test_checks.h"
#include "lab/kinds/ivf/ivf_blob.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

constexpr IndexParams kIvf = {.kind = IndexKind::kIvf};

void FixHeaderCrc(std::string& blob) {
  const uint32_t crc = Crc32c(blob.substr(0, 60));
  std::memcpy(blob.data() + 60, &crc, 4);
}

TEST(IvfLists, AreFourRootsOfTheRowsUnlessAskedForAndNoMoreThanRows) {
  EXPECT_EQ(IvfLists(0, 0), 0);
  EXPECT_EQ(IvfLists(0, 1), 1);
  EXPECT_EQ(IvfLists(0, 10000), 400);
  EXPECT_EQ(IvfLists(7, 10000), 7);
  EXPECT_EQ(IvfLists(700, 100), 100);
}

TEST(IvfTest, Blob_HoldsEveryRowOnceInItsListAscending) {
  std::mt19937_64 rng(TestSeed());
  for (const int64_t rows : {1, 3, 100, 3000}) {
    const KeySet keys = MakeKeys(rng, rows, 32);
    const auto blob = IvfBlob::Open(*BuildIndex(kIvf, keys.AsRows()));
    CARREL_ASSERT_OK(blob);  // checks the lists
    EXPECT_EQ(blob->header().lists, IvfLists(0, rows));
    int64_t sum = 0;
    for (int64_t list = 0; list < blob->header().lists; ++list) sum += blob->size(list);
    EXPECT_EQ(sum, rows);
  }
}

TEST(IvfTest, EqualKeys_AreFoundByIdInAnyNumberOfLists) {
  const KeySet keys{
      .count = 2000, .head_dim = 16, .keys = std::vector<uint16_t>(2000 * 16, 0x3f80)};
  const std::vector<float> queries(16, 1.0f);
  for (const int32_t lists : {1, 2, 100, 2000}) {
    const IndexParams params{.kind = IndexKind::kIvf, .effort = 1, .ivf_lists = lists};
    const SearchRequest request{
        .queries = queries.data(), .group = 1, .scale = 1, .zone = {7, 1990}, .top_k = 4};
    const SearchResult result = MustSearch(*MustBuild(params, keys.AsRows()), request);
    ExpectValid(keys, request, result);
    EXPECT_EQ(result.ids.size(), 4u);
    EXPECT_NEAR(result.zone_lse[0], 16 + std::log(1983.0), 1e-3);
  }
}

TEST(IvfTest, Search_ProbedListsHoldFewerThanWanted_ProbesMore) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 6000, 64);
  const auto index = MustBuild({.kind = IndexKind::kIvf, .effort = 1}, keys.AsRows());
  for (int round = 0; round < 10; ++round) {
    const std::vector<float> queries = MakeQueries(rng, keys, 3);
    const SearchRequest request{
        .queries = queries.data(), .group = 3, .scale = 0.125f, .zone = {4, 5900}, .top_k = 400};
    const SearchResult result = MustSearch(*index, request);
    ExpectValid(keys, request, result);
    EXPECT_FALSE(result.zone_scored);
    EXPECT_EQ(result.ids.size(), 400u);
  }
}

// What the lists hold decides, not their number. A third of the rows are one key, in few lists: who
// asks for it would read more than a scan does, who asks for its opposite would not. Other queries
// may do either.
TEST(IvfTest, Search_ListsHoldTooManyRows_ScansTheZone) {
  std::mt19937_64 rng(TestSeed());
  KeySet keys = MakeKeys(rng, 6000, 64);
  const std::vector<float> alike = RandomNormal(rng, 64, 4.0f);
  for (Position row = 2000; row < 4000; ++row) FloatToBf16(alike, &keys.keys[row * 64]);
  const auto index = MustBuild(kIvf, keys.AsRows());
  const auto scans = [&](const std::vector<float>& queries, int32_t probes) {
    const SearchRequest request{.queries = queries.data(),
                                .group = 2,
                                .scale = 0.125f,
                                .zone = {4, 5900},
                                .top_k = 32,
                                .effort = probes};
    const SearchResult result = MustSearch(*index, request);
    ExpectValid(keys, request, result);
    // 309 lists, whose centres are read too; four rows in order cost as much as one elsewhere.
    const int64_t rows = result.visited / 2 - 309;
    EXPECT_EQ(result.zone_scored, result.visited == 2 * 5896) << probes;
    EXPECT_TRUE(result.zone_scored || 309 + 4 * rows < 5896) << probes;
    return result.zone_scored;
  };
  std::vector<float> toward, away;
  for (int i = 0; i < 128; ++i) {
    toward.push_back(alike[i % 64] / 2);
    away.push_back(-toward.back());
  }
  for (const int32_t probes : {8, 32, 70}) EXPECT_TRUE(scans(toward, probes)) << probes;
  for (const int32_t probes : {1, 8, 32}) EXPECT_FALSE(scans(away, probes)) << probes;
  for (const int32_t probes : {4, 8, 16, 32, 48, 64, 70}) {
    for (int round = 0; round < 5; ++round) scans(MakeQueries(rng, keys, 2), probes);
  }
}

TEST(IvfTest, Recall_RisesWithEffortToOne) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 6000, 64);
  const auto blob = *BuildIndex(kIvf, keys.AsRows());
  std::cout << "bytes/key=" << static_cast<double>(blob.size()) / 6000 << "\n";
  EXPECT_LT(static_cast<int64_t>(blob.size()), 6000 * 12);
  const auto index = *OpenIndex(kIvf, blob, keys.AsRows());
  constexpr int kRounds = 40;
  double before = 0;
  for (const int32_t probes : {2, 8, 16, 32, 64, 300}) {
    std::mt19937_64 queries_rng(7);
    double recall = 0, lse_error = 0, visited = 0;
    for (int round = 0; round < kRounds; ++round) {
      const std::vector<float> queries = MakeQueries(queries_rng, keys, 2);
      const SearchRequest request{.queries = queries.data(),
                                  .group = 2,
                                  .scale = 0.125f,
                                  .zone = {4, 5900},
                                  .top_k = 32,
                                  .effort = probes};
      const SearchResult result = MustSearch(*index, request);
      const SearchResult exact = BruteForce(keys, request);
      recall += Recall(result, exact) / kRounds;
      lse_error += std::abs(result.zone_lse[0] - exact.zone_lse[0]) / kRounds;
      visited += static_cast<double>(result.visited) / kRounds / 2 / 5896;
    }
    std::cout << "probes=" << probes << " recall@32=" << recall << " lse error=" << lse_error
              << " visited=" << visited << "\n";
    EXPECT_GE(recall, before - 0.005);
    // Lists chosen at random would find the share that is visited, 0.10 and 0.26; of 100 seeds the
    // worst were 0.39 and 0.74.
    if (probes == 16) {
      EXPECT_GT(recall, 0.25);
    }
    if (probes == 64) {
      EXPECT_GT(recall, 0.6);
    }
    before = recall;
  }
  EXPECT_NEAR(before, 1, 1e-9);
}

TEST(IvfTest, Open_OtherListsThanAsked_IsRefused) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 500, 32);
  IndexParams params{.kind = IndexKind::kIvf, .ivf_lists = 20};
  const auto blob = *BuildIndex(params, keys.AsRows());
  CARREL_EXPECT_OK(OpenIndex(params, blob, keys.AsRows()));
  params.ivf_lists = 0;
  EXPECT_THAT(OpenIndex(params, blob, keys.AsRows()),
              StatusIs(StatusCode::kInvalidArgument, "ivf_lists=20, not ivf_lists=0"));
}

TEST(IvfTest, Build_KeysThatAreNotFinite_IsInternalOrHarmless) {
  std::mt19937_64 rng(TestSeed());
  KeySet keys = MakeKeys(rng, 600, 16);
  for (int i = 0; i < 50; ++i) keys.keys[rng() % keys.keys.size()] = 0x7fc0;
  const auto blob = BuildIndex(kIvf, keys.AsRows());
  if (blob.ok()) return;
  EXPECT_THAT(blob, StatusIs(StatusCode::kInternal, "k-means of 600 rows"));
}

TEST(IvfBlobTest, Open_Truncated_IsDataLoss) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 60, 16);
  const auto blob = *BuildIndex(kIvf, keys.AsRows());
  for (size_t size = 0; size < blob.size(); size += size < 70 ? 1 : 13) {
    EXPECT_THAT(OpenIndex(kIvf, blob.substr(0, size), keys.AsRows()),
                StatusIs(StatusCode::kDataLoss, "ivf blob"));
  }
  EXPECT_THAT(OpenIndex(kIvf, blob + "1234", keys.AsRows()),
              StatusIs(StatusCode::kDataLoss, "bytes instead of"));
}

TEST(IvfBlobTest, Open_AnotherVersion_IsFailedPreconditionNamingBoth) {
  std::mt19937_64 rng(TestSeed());
  std::string blob = *BuildIndex(kIvf, MakeKeys(rng, 60, 16).AsRows());
  blob[4] = 9;
  FixHeaderCrc(blob);
  EXPECT_THAT(IvfBlob::Open(blob),
              StatusIs(StatusCode::kFailedPrecondition, "version 9, this program reads version 1"));
}

// Damage that the CRC of the header does not see, and header fields with a right CRC.
TEST(IvfBlobTest, MutatedBlobs_NeverCrashOpeningOrSearching) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 600, 16);
  const IndexParams params{.kind = IndexKind::kIvf, .effort = 2};
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
    if (mutated.size() >= 64) FixHeaderCrc(mutated);
    const auto index = OpenIndex(params, mutated, keys.AsRows());
    if (!index.ok()) continue;
    ++opened;
    SearchScratch scratch;
    SearchResult result;
    CARREL_EXPECT_OK((*index)->Search(
        {.queries = queries.data(), .group = 2, .scale = 1, .zone = {5, 595}, .top_k = 8}, scratch,
        result));
    for (const Position id : result.ids) EXPECT_TRUE(id >= 5 && id < 595);
  }
  EXPECT_GT(opened, 50) << "some mutations leave valid lists";
}

TEST(IvfBlobTest, RandomGarbage_IsDataLoss) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 2000; ++round) {
    std::string bytes(rng() % 300, '\0');
    for (char& c : bytes) c = static_cast<char>(rng());
    if (bytes.size() >= 64) {
      bytes.replace(0, 8, std::string("CIVF\1\0\0\0", 8));
      if (round % 2 == 0) FixHeaderCrc(bytes);
    }
    EXPECT_EQ(IvfBlob::Open(bytes).status().code(), StatusCode::kDataLoss);
  }
}

}  // namespace
}  // namespace carrel::kvstore
