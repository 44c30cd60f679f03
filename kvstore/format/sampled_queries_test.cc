#include "kvstore/format/sampled_queries.h"

#include "absl/strings/escaping.h"
#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

SampledQueries Example() {
  return {.group = 2, .head_dim = 1, .positions = {3, 258}, .queries = {1.0f, -2.0f, 0.5f, 0.0f}};
}

TEST(SampledQueriesTest, Encode_Known_HasGoldenBytes) {
  const auto payload = EncodeSampledQueries(Example());
  CARREL_ASSERT_OK(payload);
  EXPECT_EQ(absl::BytesToHexString(*payload),
            "02000000"
            "02000000"
            "01000000"
            "00000000"
            "0300000000000000"
            "0201000000000000"
            "0000803f"
            "000000c0"
            "0000003f"
            "00000000");
}

TEST(SampledQueriesTest, Decode_OfEncoded_IsEqual) {
  std::mt19937_64 rng(TestSeed());
  for (const int64_t samples : {0, 1, 17, 300}) {
    SampledQueries sampled{.group = 1 + static_cast<int64_t>(rng() % 8),
                           .head_dim = 1 + static_cast<int64_t>(rng() % 128)};
    Position position = -1;
    for (int64_t i = 0; i < samples; ++i) {
      position += 1 + static_cast<Position>(rng() % 1000);
      sampled.positions.push_back(position);
    }
    sampled.queries = RandomNormal(rng, samples * sampled.group * sampled.head_dim);
    const auto payload = EncodeSampledQueries(sampled);
    CARREL_ASSERT_OK(payload);
    const auto decoded = DecodeSampledQueries(*payload);
    CARREL_ASSERT_OK(decoded);
    EXPECT_EQ(decoded->positions, sampled.positions);
    EXPECT_EQ(decoded->queries, sampled.queries);
    EXPECT_EQ(decoded->group, sampled.group);
    EXPECT_EQ(decoded->head_dim, sampled.head_dim);
    if (samples > 0) {
      const int64_t at = (samples * sampled.group - 1) * sampled.head_dim;
      EXPECT_EQ(*decoded->Query(samples - 1, sampled.group - 1),
                sampled.queries[static_cast<size_t>(at)]);
    }
  }
}

TEST(SampledQueriesTest, Decode_TruncatedOrExtended_IsDataLoss) {
  const std::string payload = EncodeSampledQueries(Example()).value();
  for (size_t size = 0; size < payload.size(); ++size) {
    EXPECT_THAT(DecodeSampledQueries(payload.substr(0, size)),
                StatusIs(absl::StatusCode::kDataLoss, "sampled queries"));
  }
  EXPECT_THAT(DecodeSampledQueries(payload + "x"),
              StatusIs(absl::StatusCode::kDataLoss, "49 bytes, must be 48"));
}

TEST(SampledQueriesTest, Decode_RandomHeaders_AreDataLossOrFit) {
  std::mt19937_64 rng(TestSeed());
  const std::string payload = EncodeSampledQueries(Example()).value();
  for (int round = 0; round < 5000; ++round) {
    std::string bytes = payload;
    bytes[rng() % 32] = static_cast<char>(rng());
    if (round % 2 == 0) bytes[rng() % 16] = static_cast<char>(rng());
    const auto decoded = DecodeSampledQueries(bytes);
    if (decoded.ok()) {
      EXPECT_EQ(*EncodeSampledQueries(*decoded), bytes);
    } else {
      EXPECT_EQ(decoded.status().code(), absl::StatusCode::kDataLoss);
    }
  }
}

TEST(SampledQueriesTest, Encode_BadShapes_NameFieldValueAndBound) {
  SampledQueries sampled = Example();
  sampled.positions = {5, 5};
  EXPECT_THAT(EncodeSampledQueries(sampled),
              StatusIs(absl::StatusCode::kInvalidArgument, "position 5 follows 5"));
  sampled = Example();
  sampled.queries.pop_back();
  EXPECT_THAT(EncodeSampledQueries(sampled),
              StatusIs(absl::StatusCode::kInvalidArgument, "3 floats, must be 4"));
  sampled = Example();
  sampled.group = 0;
  EXPECT_THAT(EncodeSampledQueries(sampled),
              StatusIs(absl::StatusCode::kInvalidArgument, "group=0"));
}

}  // namespace
}  // namespace carrel::kvstore
