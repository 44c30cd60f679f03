#include "model/rope_config.h"

#include <cmath>
#include <fstream>
#include <vector>

#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/test_configs.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;

TEST(RopeConfigTest, BothSpellings_GiveTheSame) {
  const json llama3 = {{"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}};
  json old_type = llama3, new_type = llama3, parameters = llama3;
  old_type["type"] = "llama3";
  new_type["rope_type"] = "llama3";
  parameters["rope_type"] = "llama3";
  parameters["rope_theta"] = 500000.0;
  const std::vector<json> spellings = {
      {{"rope_theta", 500000.0}, {"rope_scaling", old_type}},
      {{"rope_theta", 500000}, {"rope_scaling", new_type}},
      {{"rope_parameters", parameters}},
      {{"rope_parameters", parameters}, {"rope_theta", 500000.0}, {"rope_scaling", new_type}},
      {{"rope_scaling", parameters}},
  };
  for (const json& spelling : spellings) {
    const auto config = LoadConfig(PatchedConfig("llama", spelling));
    CARREL_ASSERT_OK(config) << spelling;
    EXPECT_EQ(config->rope.type, RopeType::kLlama3);
    EXPECT_EQ(config->rope.theta, 500000.0);
    EXPECT_EQ(config->rope.factor, 8.0);
    EXPECT_EQ(config->rope.low_freq_factor, 1.0);
    EXPECT_EQ(config->rope.high_freq_factor, 4.0);
    EXPECT_EQ(config->rope.original_max_position_embeddings, 8192);
  }
  for (const json& spelling :
       {json{{"rope_scaling", {{"type", "linear"}, {"factor", 4}}}},
        json{{"rope_parameters", {{"rope_type", "linear"}, {"factor", 4.0}}}},
        json{{"rope_scaling", {{"rope_type", "linear"}, {"type", "linear"}, {"factor", 4.0}}}}}) {
    const auto config = LoadConfig(PatchedConfig("llama", spelling));
    CARREL_ASSERT_OK(config) << spelling;
    EXPECT_EQ(config->rope.type, RopeType::kLinear);
    EXPECT_EQ(config->rope.factor, 4.0);
    EXPECT_EQ(config->rope.theta, 10000.0);
  }
}

TEST(RopeInvFreqTest, Default_IsThePower) {
  RopeConfig rope;
  rope.theta = 500000.0;
  const std::vector<float> f = RopeInvFreq(rope, 64);
  ASSERT_EQ(f.size(), 32u);
  EXPECT_EQ(f[0], 1.0f);
  for (size_t i = 0; i < f.size(); ++i) {
    EXPECT_NEAR(f[i] / std::pow(500000.0, -2.0 * i / 64), 1.0, 3e-7) << i;
  }
}

TEST(RopeInvFreqTest, Linear_IsDividedByFactor) {
  RopeConfig rope;
  const std::vector<float> plain = RopeInvFreq(rope, 32);
  rope.type = RopeType::kLinear;
  rope.factor = 4.0;
  const std::vector<float> scaled = RopeInvFreq(rope, 32);
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(scaled[i], plain[i] / 4.0f);
}

TEST(RopeInvFreqTest, Llama3_ShortWavelengthsStayLongOnesShrink) {
  RopeConfig rope;
  rope.theta = 500000.0;
  const std::vector<float> plain = RopeInvFreq(rope, 128);
  rope.type = RopeType::kLlama3;
  rope.factor = 8.0;
  rope.low_freq_factor = 1.0;
  rope.high_freq_factor = 4.0;
  rope.original_max_position_embeddings = 8192;
  const std::vector<float> scaled = RopeInvFreq(rope, 128);
  int between = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    const double wavelength = 2 * M_PI / plain[i];
    const double smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0);
    const double expected = smooth <= 0   ? plain[i] / 8.0
                            : smooth >= 1 ? plain[i]
                                          : (1 - smooth) * plain[i] / 8.0 + smooth * plain[i];
    EXPECT_NEAR(scaled[i] / expected, 1.0, 1e-6) << i;
    between += smooth > 0 && smooth < 1;
  }
  EXPECT_GT(between, 0);
}

// What transformers computes (tools/goldens/rope.py).
TEST(RopeInvFreqTest, Yarn_EqualsTransformers) {
  std::ifstream file(SourceFolder() + "/model/testdata/rope.json");
  const json goldens = json::parse(file);
  ASSERT_GE(goldens.size(), 8u);
  for (const json& golden : goldens) {
    const auto config = LoadConfig(
        PatchedConfig("qwen2", {{"head_dim", golden["head_dim"]},
                                {"rope_theta", golden["rope_theta"]},
                                {"max_position_embeddings", golden["max_position_embeddings"]},
                                {"rope_scaling", golden["rope_scaling"]}}));
    CARREL_ASSERT_OK(config) << golden["rope_scaling"];
    EXPECT_NEAR(config->rope.attention_factor, golden["attention_factor"].get<double>(), 1e-12);
    const std::vector<float> f = RopeInvFreq(config->rope, config->shape.head_dim);
    const auto expected = golden["inv_freq"].get<std::vector<double>>();
    ASSERT_EQ(f.size(), expected.size());
    for (size_t i = 0; i < f.size(); ++i) {
      EXPECT_NEAR(f[i] / expected[i], 1.0, 1e-6) << golden["rope_scaling"] << " " << i;
    }
  }
}

}  // namespace
}  // namespace carrel::model
