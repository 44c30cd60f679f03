#include "model/fingerprint.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "common/test_util.h"
#include "model/test_configs.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;

TEST(FingerprintFieldsTest, Gemmas_TellItsLayersApart) {
  const auto base =
      LoadConfig(PatchedConfig("gemma3_text", {{"sliding_window", 512}}))->FingerprintFields();
  const json changes[] = {{{"sliding_window", 1024}},
                          {{"sliding_window", 512}, {"sliding_window_pattern", 3}},
                          {{"sliding_window", 512}, {"rope_local_base_freq", 2e4}},
                          {{"sliding_window", 512}, {"rope_theta", 2e6}},
                          {{"sliding_window", 512}, {"query_pre_attn_scalar", 128}}};
  for (const json& change : changes) {
    EXPECT_NE(LoadConfig(PatchedConfig("gemma3_text", change))->FingerprintFields(), base)
        << change;
  }
  for (const auto& [name, value] : LoadConfig(BaseConfig("llama"))->FingerprintFields()) {
    EXPECT_EQ(name.find("sliding"), std::string::npos);
  }
}

TEST(FingerprintFieldsTest, YarnsOwn_AreThereOnlyWithYarn) {
  const auto names = [](const json& set) {
    std::vector<std::string> names;
    for (const auto& [name, value] : LoadConfig(PatchedConfig("llama", set))->FingerprintFields()) {
      names.push_back(name);
    }
    EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
    return names;
  };
  EXPECT_THAT(names(json::object()), testing::Not(testing::Contains("rope_attention_factor")));
  const json yarn = {{"type", "yarn"}, {"factor", 2.0}};
  for (const char* name :
       {"rope_attention_factor", "rope_beta_fast", "rope_beta_slow", "rope_truncate"}) {
    EXPECT_THAT(names({{"rope_scaling", yarn}}), testing::Contains(name));
  }
  const auto base = LoadConfig(PatchedConfig("llama", {{"rope_scaling", yarn}}));
  for (const auto& [name, value] : {std::pair{"attention_factor", json(1.5)},
                                    {"beta_fast", 16},
                                    {"beta_slow", 2},
                                    {"truncate", false}}) {
    json other = yarn;
    other[name] = value;
    EXPECT_NE(LoadConfig(PatchedConfig("llama", {{"rope_scaling", other}}))->FingerprintFields(),
              base->FingerprintFields())
        << name;
  }
}

TEST(FingerprintFieldsTest, EveryFieldThatMatters_ChangesTheList) {
  const auto base = LoadConfig(BaseConfig("llama"));
  CARREL_ASSERT_OK(base);
  const auto fields = base->FingerprintFields();
  EXPECT_TRUE(std::is_sorted(fields.begin(), fields.end()));
  const std::vector<json> changes = {{{"hidden_size", 1024}},
                                     {{"intermediate_size", 512}},
                                     {{"num_hidden_layers", 5}},
                                     {{"num_attention_heads", 4}},
                                     {{"num_key_value_heads", 4}},
                                     {{"vocab_size", 1001}},
                                     {{"head_dim", 32}},
                                     {{"rms_norm_eps", 1e-5}},
                                     {{"rope_theta", 10001.0}},
                                     {{"attention_bias", true}},
                                     {{"mlp_bias", true}},
                                     {{"tie_word_embeddings", true}},
                                     {{"rope_scaling", {{"type", "linear"}, {"factor", 2}}}}};
  for (const json& change : changes) {
    const auto other = LoadConfig(PatchedConfig("llama", change));
    CARREL_ASSERT_OK(other) << change;
    EXPECT_NE(other->FingerprintFields(), fields) << change;
  }
  const auto same =
      LoadConfig(PatchedConfig("llama", {{"eos_token_id", 9}, {"max_position_embeddings", 99}}));
  CARREL_ASSERT_OK(same);
  EXPECT_EQ(same->FingerprintFields(), fields);
}

}  // namespace
}  // namespace carrel::model
