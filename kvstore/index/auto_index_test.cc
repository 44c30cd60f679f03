#include "kvstore/index/auto_index.h"

#include <cmath>
#include <set>

#include "common/test_util.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/index_test_util.h"

namespace carrel::kvstore {
namespace {

SampledQueries MakeSamples(std::mt19937_64& rng, const KeySet& keys, int64_t group,
                           int64_t samples) {
  SampledQueries sampled;
  sampled.group = group;
  sampled.head_dim = keys.head_dim;
  for (int64_t i = 0; i < samples; ++i) {
    sampled.positions.push_back((i + 1) * keys.count / samples - 1);
    const std::vector<float> queries = MakeQueries(rng, keys, group);
    sampled.queries.insert(sampled.queries.end(), queries.begin(), queries.end());
  }
  return sampled;
}

TEST(AutoIndexTest, Choice_ReachesTheRecallOnQueriesItWasNotBuiltWith) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 20000, 64);
  const SampledQueries sampled = MakeSamples(rng, keys, 2, 48);
  AutoIndexConfig config;
  config.wanted = 32;
  config.kinds = {IndexKind::kFlat, IndexKind::kCode};
  for (const double recall : {0.3, 0.9, 1.0}) {
    config.want_recall = recall;
    const auto chosen = BuildAutoIndex(config, keys.AsRows(), sampled);
    CARREL_ASSERT_OK(chosen);
    EXPECT_GE(chosen->recall, recall);
    EXPECT_LE(chosen->recall, 1.0);
    EXPECT_GT(chosen->mass, 0.0);
    EXPECT_LE(chosen->mass, 1.0 + 1e-4);
    EXPECT_EQ(chosen->queries, 16);
    std::cout << "want " << recall << ": " << IndexKindName(chosen->params.kind) << " effort "
              << chosen->params.effort << " recall " << chosen->recall << "\n";
    // What is stored opens, and is the same every time.
    CARREL_EXPECT_OK(OpenIndex(chosen->params, Blob(chosen->blob), keys.AsRows()));
    const auto again = BuildAutoIndex(config, keys.AsRows(), sampled);
    CARREL_ASSERT_OK(again);
    EXPECT_EQ(again->blob, chosen->blob);
    EXPECT_EQ(again->params.kind, chosen->params.kind);
    EXPECT_EQ(again->params.effort, chosen->params.effort);
  }
}

TEST(AutoIndexTest, NoQueryThatSeesEnough_IsFlat) {
  std::mt19937_64 rng(TestSeed());
  const KeySet keys = MakeKeys(rng, 300, 32);
  const auto chosen = BuildAutoIndex({}, keys.AsRows(), MakeSamples(rng, keys, 1, 10));
  CARREL_ASSERT_OK(chosen);
  EXPECT_EQ(chosen->params.kind, IndexKind::kFlat);
  EXPECT_TRUE(chosen->blob.empty());
  EXPECT_EQ(chosen->queries, 0);
}

TEST(AutoIndexTest, Config_OutOfBounds_NamesValueAndBounds) {
  const auto invalid = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(ValidateAutoIndexConfig({.want_recall = 0}), StatusIs(invalid, "want_recall=0"));
  EXPECT_THAT(ValidateAutoIndexConfig({.want_recall = 1.1}), StatusIs(invalid, "want_recall=1.1"));
  EXPECT_THAT(ValidateAutoIndexConfig({.wanted = 0}), StatusIs(invalid, "wanted=0"));
  EXPECT_THAT(ValidateAutoIndexConfig({.params = {.code_bits = 100}}),
              StatusIs(invalid, "code_bits=100"));
}

}  // namespace
}  // namespace carrel::kvstore
