#include "model/config.h"

#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/test_configs.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::IsEmpty;

void WriteText(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

TEST(ConfigTest, MinimalFile_TakesTransformersDefaults) {
  const auto config = LoadConfig(
      PatchedConfig("llama", {{"-num_key_value_heads", 0}, {"-max_position_embeddings", 0}}));
  CARREL_ASSERT_OK(config);
  EXPECT_EQ(config->architecture, Architecture::kLlama);
  EXPECT_EQ(config->shape, (AttentionShape{4, 8, 8, 64}));
  EXPECT_EQ(config->max_position_embeddings, 2048);
  EXPECT_EQ(config->rms_norm_eps, 1e-6);
  EXPECT_EQ(config->rope.type, RopeType::kDefault);
  EXPECT_EQ(config->rope.theta, 10000.0);
  EXPECT_FALSE(config->tie_word_embeddings || config->qkv_bias || config->output_bias ||
               config->mlp_bias || config->qk_norm);
  EXPECT_EQ(config->bos_token_id, 3);
  EXPECT_THAT(config->eos_token_ids, ElementsAre(4));
}

TEST(ConfigTest, AbsentSpecialTokens_AreTheClassDefaultsAndNullIsNone) {
  const auto absent =
      LoadConfig(PatchedConfig("llama", {{"-bos_token_id", 0}, {"-eos_token_id", 0}}));
  CARREL_ASSERT_OK(absent);
  EXPECT_EQ(absent->bos_token_id, 1);
  EXPECT_THAT(absent->eos_token_ids, ElementsAre(2));
  const auto null =
      LoadConfig(PatchedConfig("llama", {{"bos_token_id", nullptr}, {"eos_token_id", nullptr}}));
  CARREL_ASSERT_OK(null);
  EXPECT_EQ(null->bos_token_id, -1);
  EXPECT_THAT(null->eos_token_ids, IsEmpty());
  const auto qwen =
      LoadConfig(PatchedConfig("qwen2", {{"-bos_token_id", 0}, {"-eos_token_id", 0}}));
  CARREL_ASSERT_OK(qwen);
  EXPECT_EQ(qwen->bos_token_id, -1);
  EXPECT_THAT(qwen->eos_token_ids, IsEmpty());
}

TEST(ConfigTest, GenerationConfig_TakesPrecedence) {
  const auto both =
      LoadConfig(BaseConfig("llama"), R"({"eos_token_id": [7, 9], "bos_token_id": 5})");
  CARREL_ASSERT_OK(both);
  EXPECT_THAT(both->eos_token_ids, ElementsAre(7, 9));
  EXPECT_EQ(both->bos_token_id, 5);
  const auto silent = LoadConfig(BaseConfig("llama"), R"({"do_sample": true})");
  CARREL_ASSERT_OK(silent);
  EXPECT_THAT(silent->eos_token_ids, ElementsAre(4));
  EXPECT_THAT(LoadConfig(BaseConfig("llama"), R"({"eos_token_id": 1000})"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "generation_config.json: eos_token_id=1000 is not a token id, or list of "
                       "them, in [0, 1000)"));
  EXPECT_THAT(LoadConfig(BaseConfig("llama"), "{"),
              StatusIs(absl::StatusCode::kInvalidArgument, "generation_config.json: not valid"));
}

TEST(ConfigTest, Biases_AreAsTransformersBuildsThem) {
  const auto llama =
      LoadConfig(PatchedConfig("llama", {{"attention_bias", true}, {"mlp_bias", true}}));
  CARREL_ASSERT_OK(llama);
  EXPECT_TRUE(llama->qkv_bias && llama->output_bias && llama->mlp_bias);
  const auto qwen2 = LoadConfig(BaseConfig("qwen2"));
  CARREL_ASSERT_OK(qwen2);
  EXPECT_TRUE(qwen2->qkv_bias);
  EXPECT_FALSE(qwen2->output_bias || qwen2->qk_norm);
  const auto qwen3 = LoadConfig(PatchedConfig("qwen3", {{"attention_bias", true}}));
  CARREL_ASSERT_OK(qwen3);
  EXPECT_TRUE(qwen3->qkv_bias && qwen3->output_bias && qwen3->qk_norm);
}

TEST(ConfigTest, HeadDimAbsentNullOrGiven_FollowsTheClass) {
  struct Case {
    const char* model_type;
    json set;
    int head_dim;
  };
  const std::vector<Case> cases = {
      {"llama", json::object(), 64},
      {"llama", {{"head_dim", nullptr}}, 64},
      {"llama", {{"head_dim", 32}}, 32},
      {"mistral", {{"sliding_window", nullptr}, {"head_dim", 128}}, 128},
      {"qwen2", {{"head_dim", 48}}, 48},
      {"qwen3", json::object(), 128},
      {"qwen3", {{"head_dim", nullptr}}, 64},
      {"llama", {{"hidden_size", 500}, {"head_dim", 32}}, 32},
  };
  for (const Case& c : cases) {
    const auto config = LoadConfig(PatchedConfig(c.model_type, c.set));
    CARREL_ASSERT_OK(config) << c.model_type << c.set;
    EXPECT_EQ(config->shape.head_dim, c.head_dim) << c.model_type << c.set;
  }
}

TEST(ConfigTest, KvHeadsAbsentOrNull_FollowsTheClass) {
  const auto absent = LoadConfig(PatchedConfig(
      "mistral",
      {{"sliding_window", nullptr}, {"-num_key_value_heads", 0}, {"num_attention_heads", 32}}));
  CARREL_ASSERT_OK(absent);
  EXPECT_EQ(absent->shape.kv_heads, 8);
  const auto null = LoadConfig(PatchedConfig("mistral", {{"sliding_window", nullptr},
                                                         {"num_key_value_heads", nullptr},
                                                         {"num_attention_heads", 32}}));
  CARREL_ASSERT_OK(null);
  EXPECT_EQ(null->shape.kv_heads, 32);
}

TEST(ConfigTest, Experts_BothSpellingsAndLayers) {
  const json moe = {
      {"num_experts", 8},       {"num_experts_per_tok", 2},      {"moe_intermediate_size", 64},
      {"norm_topk_prob", true}, {"router_aux_loss_coef", 0.001}, {"output_router_logits", false},
      {"mlp_only_layers", {3}}, {"decoder_sparse_step", 2}};
  const auto config = LoadConfig(PatchedConfig("qwen3_moe", moe));
  CARREL_ASSERT_OK(config);
  EXPECT_TRUE(config->qk_norm);
  EXPECT_EQ(config->shape.head_dim, 64);  // of hidden_size and heads
  EXPECT_EQ(config->experts.count, 8);
  EXPECT_EQ(config->experts.per_token, 2);
  EXPECT_EQ(config->experts.intermediate_size, 64);
  EXPECT_TRUE(config->experts.normalize);
  std::vector<bool> in;
  for (int layer = 0; layer < 4; ++layer) in.push_back(config->experts.In(Layer(layer)));
  EXPECT_THAT(in, ElementsAre(false, true, false, false));
  json local = moe;
  local.erase("num_experts");
  local["num_local_experts"] = 8;
  EXPECT_EQ(LoadConfig(PatchedConfig("qwen3_moe", local))->FingerprintFields(),
            config->FingerprintFields());
  const std::pair<const char*, json> other[] = {
      {"num_experts", 9},        {"num_experts_per_tok", 3},         {"moe_intermediate_size", 32},
      {"norm_topk_prob", false}, {"mlp_only_layers", json::array()}, {"decoder_sparse_step", 1}};
  for (const auto& [name, value] : other) {
    json changed = moe;
    changed[name] = value;
    EXPECT_NE(LoadConfig(PatchedConfig("qwen3_moe", changed))->FingerprintFields(),
              config->FingerprintFields())
        << name;
  }
  const std::pair<const char*, json> bad[] = {
      {"num_experts", 0},         {"num_local_experts", 9},
      {"num_experts_per_tok", 9}, {"moe_intermediate_size", nullptr},
      {"norm_topk_prob", 1},      {"mlp_only_layers", {4}},
      {"mlp_only_layers", 3},     {"decoder_sparse_step", 0}};
  for (const auto& [name, value] : bad) {
    json changed = moe;
    changed[name] = value;
    EXPECT_THAT(LoadConfig(PatchedConfig("qwen3_moe", changed)),
                StatusIs(absl::StatusCode::kInvalidArgument, name));
  }
  // Elsewhere they are fields that nobody understands.
  EXPECT_THAT(LoadConfig(PatchedConfig("qwen3", {{"num_experts", 8}})),
              StatusIs(absl::StatusCode::kUnimplemented, "num_experts=8 is not understood"));
  CARREL_EXPECT_OK(
      LoadConfig(PatchedConfig("qwen3", {{"num_experts", 0}, {"num_experts_per_tok", 0}})));
}

// Where layers have a window, in any spelling, attention over all tokens is right up to it and no further,
// whatever the model was trained for.
TEST(ConfigTest, SlidingWindow_BoundsTheTokensThatAreRun) {
  const json full =
      json::array({"full_attention", "full_attention", "full_attention", "full_attention"});
  json sliding = full;
  sliding[2] = "sliding_attention";
  const json used = {{"use_sliding_window", true}, {"sliding_window", 128}};
  const auto with = [&](json more) {
    more.update(used);
    return more;
  };
  const struct {
    const char* model_type;
    json set;
    int64_t limit;
  } kCases[] = {
      {"mistral", {{"sliding_window", nullptr}}, 0},
      {"mistral", {{"sliding_window", 1024}}, 1024},
      {"mistral", {{"sliding_window", 4096}}, 4096},
      {"mistral", {{"max_position_embeddings", 32768}}, 4096},  // the class's default
      {"mistral", {{"sliding_window", 65536}}, 65536},
      {"llama", {{"sliding_window", 16}}, 16},
      {"llama", json::object(), 0},
      {"qwen2", {{"sliding_window", 128}, {"use_sliding_window", false}}, 0},
      {"qwen2", {{"sliding_window", 128}}, 0},
      {"qwen2", with({{"max_window_layers", 3}}), 128},
      {"qwen2", with({{"max_window_layers", 4}}), 0},  // the first layer that slides is not there
      {"qwen2", with({}), 0},                          // the class's default, 28
      {"qwen3", with({{"max_window_layers", 0}}), 128},
      {"qwen3", with({{"layer_types", sliding}}), 128},
      {"qwen3", with({{"layer_types", full}, {"max_window_layers", 0}}), 0},
      {"qwen3", {{"layer_types", full}}, 0},
      {"qwen2", {{"use_sliding_window", true}, {"max_window_layers", 1}}, 4096},
  };
  for (const auto& [model_type, set, limit] : kCases) {
    const auto config = LoadConfig(PatchedConfig(model_type, set));
    CARREL_ASSERT_OK(config) << model_type << set;
    EXPECT_EQ(config->window_limit, limit) << model_type << set;
    EXPECT_TRUE(config->Windows().empty());
  }
}

TEST(ConfigTest, MaxTokens_AWindowHoldsWhereTrainingDoesNot) {
  ModelConfig config;
  config.max_position_embeddings = 300;
  EXPECT_EQ(config.MaxTokens(), 300);
  EXPECT_EQ(config.MaxTokens(true), INT64_MAX);
  CARREL_EXPECT_OK(config.CheckTokens(300, "d", false));
  CARREL_EXPECT_OK(config.CheckTokens(301, "d", true));
  EXPECT_THAT(config.CheckTokens(301, "the document", false, "; buy more"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "the document: 301 tokens exceed the model's "
                       "max_position_embeddings=300; buy more"));
  config.window_limit = 64;
  for (const bool beyond : {false, true}) {
    EXPECT_EQ(config.MaxTokens(beyond), 64);
    CARREL_EXPECT_OK(config.CheckTokens(64, "d", beyond));
    EXPECT_THAT(config.CheckTokens(65, "d", beyond, "; buy more"),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         "d: 65 tokens exceed the model's sliding_window=64 "
                         "(max_position_embeddings=300)"));
  }
  config.window_limit = 300;  // as long as trained for: binding beyond it alone
  EXPECT_EQ(config.MaxTokens(true), 300);
  EXPECT_FALSE(config.CheckTokens(301, "d", true).ok());
}

TEST(ConfigTest, AttnFactor_IsNothingToTransformers) {
  const json rope = {{"rope_type", "yarn"},
                     {"factor", 4.0},
                     {"original_max_position_embeddings", 1024},
                     {"attn_factor", 0.8782488562869419}};
  const auto config = LoadConfig(PatchedConfig("qwen3", {{"rope_scaling", rope}}));
  CARREL_ASSERT_OK(config);
  EXPECT_NEAR(config->rope.attention_factor, 1.1386294361119891, 1e-12);
  json both = rope;
  both["attention_factor"] = 0.9;
  EXPECT_EQ(LoadConfig(PatchedConfig("qwen3", {{"rope_scaling", both}}))->rope.attention_factor,
            0.9);
  json bad = rope;
  bad["attn_factor"] = "x";
  EXPECT_THAT(LoadConfig(PatchedConfig("qwen3", {{"rope_scaling", bad}})),
              StatusIs(absl::StatusCode::kInvalidArgument, "attn_factor"));
  bad["attn_factor"] = 1.0;
  bad["rope_type"] = "linear";
  EXPECT_THAT(LoadConfig(PatchedConfig("qwen3", {{"rope_scaling", bad}})),
              StatusIs(absl::StatusCode::kInvalidArgument, "attn_factor=1.0 is not a parameter"));
}

TEST(ConfigTest, EachUnsupportedField_IsNamed) {
  const auto rope = [](json scaling) { return json{{"rope_scaling", std::move(scaling)}}; };
  const json sliding_layers =
      json::array({"full_attention", "sliding_attention", "full_attention", "full_attention"});
  struct Case {
    const char* model_type;
    json set;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"gemma2", json::object(), "model_type=\"gemma2\" is not one of llama, mistral"},
      {"llama",
       {{"architectures", {"LlamaForSequenceClassification"}}},
       "architectures=[\"LlamaForSequenceClassification\"] is not [\"LlamaForCausalLM\"]"},
      {"llama", {{"architectures", json::array()}}, "architectures=[] is not"},
      {"mistral", {{"architectures", {"LlamaForCausalLM"}}}, "is not [\"MistralForCausalLM\"]"},
      {"llama", {{"hidden_act", "gelu"}}, "hidden_act=\"gelu\" is not silu"},
      {"llama", {{"quantization_config", {{"bits", 4}}}}, "quantization_config={\"bits\":4}"},
      {"llama", {{"compression_config", {{"a", 4}}}}, "compression_config"},
      {"llama", {{"partial_rotary_factor", 0.5}}, "partial_rotary_factor=0.5 is not 1"},
      {"qwen3", {{"layer_types", sliding_layers}}, "layer_types"},
      {"mistral",
       {{"sliding_window", nullptr}, {"attention_bias", true}},
       "attention_bias=true is not an option of model_type mistral"},
      {"qwen2", {{"attention_bias", true}}, "attention_bias=true is not an option"},
      {"qwen3", {{"mlp_bias", true}}, "mlp_bias=true is not an option of model_type qwen3"},
      {"llama", rope({{"rope_type", "dynamic"}, {"factor", 2}}),
       "rope_type=\"dynamic\" is not run"},
      {"llama", rope({{"rope_type", "longrope"}}), "rope_type=\"longrope\" is not run"},
      {"llama", rope({{"rope_type", "proportional"}}),
       "is not one of default, linear, llama3, yarn"},
      {"llama", rope({{"rope_type", "yarn"}, {"factor", 2}, {"beta_middle", 32}}),
       "rope_scaling: beta_middle=32 is not a rope parameter"},
      {"qwen2", rope({{"type", "default"}, {"mrope_section", {16, 24}}}), "mrope_section"},
      {"llama",
       {{"rope_parameters", {{"full_attention", {{"rope_theta", 1e4}}}}}},
       "rope_parameters: full_attention"},
      {"llama",
       {{"rope_parameters", {{"partial_rotary_factor", 0.25}}}},
       "rope_parameters: partial_rotary_factor=0.25 is not 1"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(LoadConfig(PatchedConfig(c.model_type, c.set)),
                StatusIs(absl::StatusCode::kUnimplemented, c.message))
        << c.model_type << " " << c.set;
  }
}

TEST(ConfigTest, EachInconsistentField_IsNamedWithValueAndBound) {
  const auto rope = [](json scaling) { return json{{"rope_scaling", std::move(scaling)}}; };
  struct Case {
    const char* model_type;
    json set;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"llama", {{"-model_type", 0}}, "model_type is missing"},
      {"llama", {{"model_type", 7}}, "model_type=7 is not a string"},
      {"llama", {{"architectures", "LlamaForCausalLM"}}, "is not an array"},
      {"llama", {{"-hidden_size", 0}}, "hidden_size is missing"},
      {"llama", {{"hidden_size", nullptr}}, "hidden_size is missing"},
      {"llama", {{"hidden_size", 512.5}}, "hidden_size=512.5 is not an integer"},
      {"llama", {{"hidden_size", "512"}}, "hidden_size=\"512\" is not an integer"},
      {"llama", {{"hidden_size", -1}}, "hidden_size=-1 is outside [1, 1048576]"},
      {"llama", {{"hidden_size", 18446744073709551615u}}, "is outside [1, 1048576]"},
      {"llama", {{"hidden_size", 500}}, "hidden_size=500 is not a multiple of num_attention_heads"},
      {"llama", {{"vocab_size", 0}}, "vocab_size=0 is outside [1, 16777216]"},
      {"llama", {{"num_hidden_layers", 1025}}, "num_hidden_layers=1025 is outside [1, 1024]"},
      {"llama", {{"num_key_value_heads", 0}}, "num_key_value_heads=0 is outside"},
      {"llama",
       {{"num_key_value_heads", 3}},
       "num_attention_heads=8 is not a multiple of num_key_value_heads=3"},
      {"qwen2", {{"-num_key_value_heads", 0}}, "is not a multiple of num_key_value_heads=32"},
      {"llama", {{"head_dim", 33}}, "head_dim=33 is not an even number"},
      {"llama", {{"head_dim", 4096}}, "head_dim=4096 is outside [2, 1024]"},
      {"llama",
       {{"num_attention_heads", 512}, {"num_key_value_heads", 512}},
       "head_dim=1 is not an even number in [2, 1024]"},
      {"llama", {{"rms_norm_eps", 0}}, "rms_norm_eps=0 is outside"},
      {"llama", {{"rms_norm_eps", "x"}}, "is not a number"},
      {"llama", {{"tie_word_embeddings", 1}}, "tie_word_embeddings=1 is not true or false"},
      {"llama", {{"eos_token_id", -1}}, "eos_token_id=-1 is not a token id"},
      {"llama", {{"eos_token_id", {1, 1000}}}, "eos_token_id=[1,1000] is not a token id"},
      {"llama", {{"bos_token_id", {1, 2}}}, "bos_token_id=[1,2] is not one token id"},
      {"qwen2",
       {{"layer_types", {"full_attention"}}},
       "is not an array of num_hidden_layers=4 entries"},
      {"llama", {{"rope_theta", 0.5}}, "rope_theta=0.5 is outside"},
      {"llama", {{"rope_scaling", 2.0}}, "rope_scaling=2.0 is not an object"},
      {"llama", rope({{"type", "linear"}}), "rope_scaling: factor is missing"},
      {"llama", rope({{"type", "linear"}, {"factor", 0.5}}), "factor=0.5 is outside [1,"},
      {"llama", rope({{"factor", 2}}), "factor=2 is not a parameter of rope type default"},
      {"llama", rope({{"type", "linear"}, {"factor", 2}, {"low_freq_factor", 1}}),
       "low_freq_factor=1 is not a parameter of rope type linear"},
      {"llama", rope({{"type", "linear"}, {"rope_type", "default"}, {"factor", 2}}),
       "type=\"linear\" contradicts rope_type"},
      {"llama",
       rope({{"type", "llama3"}, {"factor", 8}, {"low_freq_factor", 1}, {"high_freq_factor", 4}}),
       "original_max_position_embeddings is missing"},
      {"llama",
       rope({{"type", "llama3"},
             {"factor", 8},
             {"low_freq_factor", 4},
             {"high_freq_factor", 4},
             {"original_max_position_embeddings", 8192}}),
       "high_freq_factor=4 is not above low_freq_factor=4"},
      {"llama", rope({{"rope_type", "linear"}, {"factor", 2}, {"beta_fast", 32}}),
       "beta_fast=32 is not a parameter of rope type linear"},
      {"llama", rope({{"rope_type", "yarn"}, {"factor", 2}, {"low_freq_factor", 1}}),
       "low_freq_factor=1 is not a parameter of rope type yarn"},
      {"llama", rope({{"rope_type", "yarn"}, {"factor", 0.5}}), "factor=0.5 is outside [1,"},
      {"llama", rope({{"rope_type", "yarn"}, {"beta_fast", 1}, {"beta_slow", 2}}),
       "beta_fast=1 is below beta_slow=2"},
      {"llama", rope({{"rope_type", "yarn"}, {"attention_factor", 0}}),
       "attention_factor=0 is out"},
      {"llama", rope({{"rope_type", "yarn"}, {"truncate", 1}}), "truncate=1 is not true or false"},
      {"llama",
       {{"rope_theta", 1e4}, {"rope_parameters", {{"rope_theta", 5e5}}}},
       "rope_theta=500000.0 contradicts rope_theta=10000"},
      {"llama",
       {{"rope_parameters", {{"rope_type", "linear"}, {"factor", 2}}},
        {"rope_scaling", {{"type", "linear"}, {"factor", 4}}}},
       "contradicts rope_parameters"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(LoadConfig(PatchedConfig(c.model_type, c.set)),
                StatusIs(absl::StatusCode::kInvalidArgument, c.message))
        << c.model_type << " " << c.set;
  }
}

// Fields that could change results, of models that share these architectures' code or names.
TEST(ConfigTest, FieldThatIsNotUnderstood_IsRefusedUnlessEmpty) {
  const std::pair<const char*, json> fields[] = {
      {"attn_logit_softcapping", 50.0}, {"final_logit_softcapping", 30.0},
      {"query_pre_attn_scalar", 256},   {"qk_layernorm", true},
      {"attention_multiplier", 0.1},    {"logit_scale", 0.06},
      {"embedding_multiplier", 12},     {"residual_multiplier", 0.2},
      {"rope_interleaved", true},       {"is_encoder_decoder", true},
      {"quantization", {{"bits", 4}}},  {"auto_map", {{"AutoModel", "x.Y"}}},
      {"text_config", {{"a", 1}}},      {"a_field_of_tomorrow", "on"},
      {"a_number_of_tomorrow", 0.5}};
  for (const auto& [name, value] : fields) {
    EXPECT_THAT(LoadConfig(PatchedConfig("llama", {{name, value}})),
                StatusIs(absl::StatusCode::kUnimplemented,
                         absl::StrCat(name, "=", value.dump(), " is not understood")));
    for (const json& empty : {json(), json(false), json(""), json::array(), json::object()}) {
      CARREL_EXPECT_OK(LoadConfig(PatchedConfig("llama", {{name, empty}})));
    }
  }
  EXPECT_THAT(LoadConfig(PatchedConfig("llama", {{"is_causal", false}})),
              StatusIs(absl::StatusCode::kUnimplemented, "is_causal=false is not run"));
}

// The fields of config.json files as they are published, with the shape of the tests' own.
TEST(ConfigTest, PublishedFiles_AreAccepted) {
  const json smollm2 = {{"attention_bias", false},
                        {"attention_dropout", 0.0},
                        {"hidden_act", "silu"},
                        {"initializer_range", 0.041666666666666664},
                        {"is_llama_config", true},
                        {"mlp_bias", false},
                        {"pad_token_id", 2},
                        {"pretraining_tp", 1},
                        {"rms_norm_eps", 1e-05},
                        {"rope_interleaved", false},
                        {"rope_scaling", nullptr},
                        {"rope_theta", 100000},
                        {"tie_word_embeddings", true},
                        {"torch_dtype", "bfloat16"},
                        {"transformers.js_config", {{"kv_cache_dtype", {{"q4f16", "float16"}}}}},
                        {"transformers_version", "4.42.3"},
                        {"use_cache", true}};
  const json llama32 = {{"attention_bias", false},
                        {"attention_dropout", 0.0},
                        {"head_dim", 64},
                        {"hidden_act", "silu"},
                        {"initializer_range", 0.02},
                        {"mlp_bias", false},
                        {"pretraining_tp", 1},
                        {"rms_norm_eps", 1e-05},
                        {"rope_scaling",
                         {{"factor", 32.0},
                          {"high_freq_factor", 4.0},
                          {"low_freq_factor", 1.0},
                          {"rope_type", "llama3"},
                          {"original_max_position_embeddings", 8192}}},
                        {"rope_theta", 500000.0},
                        {"tie_word_embeddings", true},
                        {"torch_dtype", "bfloat16"},
                        {"transformers_version", "4.45.0.dev0"},
                        {"use_cache", true}};
  const json mistral = {{"attention_dropout", 0.0},
                        {"hidden_act", "silu"},
                        {"initializer_range", 0.02},
                        {"rms_norm_eps", 1e-05},
                        {"rope_theta", 1000000.0},
                        {"sliding_window", nullptr},
                        {"tie_word_embeddings", false},
                        {"torch_dtype", "bfloat16"},
                        {"transformers_version", "4.42.0.dev0"},
                        {"use_cache", true}};
  const json qwen25 = {
      {"attention_dropout", 0.0},
      {"hidden_act", "silu"},
      {"initializer_range", 0.02},
      {"max_window_layers", 28},
      {"rms_norm_eps", 1e-06},
      {"rope_theta", 1000000.0},
      {"rope_scaling",
       {{"factor", 4.0}, {"type", "yarn"}, {"original_max_position_embeddings", 32768}}},
      {"sliding_window", 131072},
      {"tie_word_embeddings", false},
      {"torch_dtype", "bfloat16"},
      {"transformers_version", "4.43.1"},
      {"use_cache", true},
      {"use_sliding_window", false}};
  const json qwen3 = {{"attention_bias", false},
                      {"attention_dropout", 0.0},
                      {"head_dim", 128},
                      {"hidden_act", "silu"},
                      {"initializer_range", 0.02},
                      {"max_window_layers", 36},
                      {"rms_norm_eps", 1e-06},
                      {"rope_scaling", nullptr},
                      {"rope_theta", 1000000},
                      {"sliding_window", nullptr},
                      {"tie_word_embeddings", true},
                      {"torch_dtype", "bfloat16"},
                      {"transformers_version", "4.51.0"},
                      {"use_cache", true},
                      {"use_sliding_window", false}};
  CARREL_EXPECT_OK(LoadConfig(PatchedConfig("llama", smollm2)));
  CARREL_EXPECT_OK(LoadConfig(PatchedConfig("llama", llama32)));
  CARREL_EXPECT_OK(LoadConfig(PatchedConfig("mistral", mistral)));
  const auto yarn = LoadConfig(PatchedConfig("qwen2", qwen25));
  CARREL_ASSERT_OK(yarn);
  EXPECT_EQ(yarn->rope.type, RopeType::kYarn);
  CARREL_EXPECT_OK(LoadConfig(PatchedConfig("qwen3", qwen3)));
}

TEST(ConfigTest, FileAbsentOrMalformed_IsNamed) {
  const std::string folder = FreshTempDir();
  EXPECT_THAT(LoadModelConfig(folder), StatusIs(absl::StatusCode::kNotFound, "config.json"));
  for (const char* text : {"", "{", "[1]", "{\"a\": \xff}", "{\"vocab_size\": 1e999}"}) {
    WriteText(folder + "/config.json", text);
    EXPECT_THAT(LoadModelConfig(folder),
                StatusIs(absl::StatusCode::kInvalidArgument, "config.json"))
        << text;
  }
}

TEST(ConfigTest, RandomBytesChanged_NeverCrashes) {
  std::mt19937_64 rng(TestSeed());
  const std::string folder = FreshTempDir();
  json full = BaseConfig("llama");
  full["rope_parameters"] = {{"rope_type", "llama3"},  {"factor", 8.0},
                             {"low_freq_factor", 1.0}, {"high_freq_factor", 4.0},
                             {"rope_theta", 500000.0}, {"original_max_position_embeddings", 64}};
  const std::string text = full.dump();
  for (int round = 0; round < 400; ++round) {
    std::string mutated = text;
    const int changes = 1 + static_cast<int>(rng() % 3);
    for (int i = 0; i < changes; ++i) mutated[rng() % mutated.size()] = static_cast<char>(rng());
    WriteText(folder + "/config.json", mutated);
    const auto config = LoadModelConfig(folder);
    if (config.ok()) {
      EXPECT_GE(config->shape.head_dim, 2);
      EXPECT_EQ(config->shape.q_heads % config->shape.kv_heads, 0);
      EXPECT_EQ(RopeInvFreq(config->rope, config->shape.head_dim).size(),
                static_cast<size_t>(config->shape.head_dim / 2));
    } else {
      EXPECT_FALSE(config.status().message().empty());
    }
  }
}

// As published files have it, and as transformers 5 writes it.
TEST(ConfigTest, Gemma3_BothSpellingsAreTheSameModel) {
  const json older = {{"sliding_window", 512},
                      {"sliding_window_pattern", 2},
                      {"rope_theta", 1e6},
                      {"rope_local_base_freq", 1e4},
                      {"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}},
                      {"hidden_activation", "gelu_pytorch_tanh"},
                      {"query_pre_attn_scalar", 168},
                      {"attn_logit_softcapping", nullptr},
                      {"final_logit_softcapping", nullptr},
                      {"cache_implementation", "hybrid"}};
  const json newer = {
      {"sliding_window", 512},
      {"layer_types",
       {"sliding_attention", "full_attention", "sliding_attention", "full_attention"}},
      {"rope_parameters",
       {{"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 1e6}}},
        {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}}}},
      {"query_pre_attn_scalar", 168}};
  for (const json& set : {older, newer}) {
    const auto config = LoadConfig(PatchedConfig("gemma3_text", set));
    CARREL_ASSERT_OK(config);
    EXPECT_TRUE(config->gemma && config->qk_norm && config->tie_word_embeddings);
    EXPECT_EQ(config->shape.head_dim, 256);
    EXPECT_EQ(config->query_scalar, 168);
    EXPECT_THAT(config->Windows(), ElementsAre(512, 0, 512, 0));
    EXPECT_EQ(config->RopeOf(Layer(0)).theta, 1e4);
    EXPECT_EQ(config->RopeOf(Layer(0)).type, RopeType::kDefault);
    EXPECT_EQ(config->RopeOf(Layer(1)).theta, 1e6);
    EXPECT_EQ(config->RopeOf(Layer(1)).factor, 8);
  }
  EXPECT_EQ(LoadConfig(PatchedConfig("gemma3_text", older))->FingerprintFields(),
            LoadConfig(PatchedConfig("gemma3_text", newer))->FingerprintFields());
  const auto plain = LoadConfig(PatchedConfig("gemma3_text", {{"num_hidden_layers", 12}}));
  CARREL_ASSERT_OK(plain);
  EXPECT_EQ(plain->sliding.window, 4096);
  EXPECT_THAT(plain->sliding.layers, ElementsAre(0, 1, 2, 3, 4, 6, 7, 8, 9, 10));
  EXPECT_EQ(plain->rope.theta, 1e6);
  EXPECT_EQ(plain->query_scalar, 256);
}

TEST(ConfigTest, Gemma3WithWhatIsNotRun_IsRefusedByName) {
  struct {
    json set;
    const char* message;
  } const kCases[] = {
      {{{"attn_logit_softcapping", 50.0}}, "attn_logit_softcapping=50.0"},
      {{{"final_logit_softcapping", 30.0}}, "final_logit_softcapping=30.0"},
      {{{"use_bidirectional_attention", true}}, "use_bidirectional_attention=true"},
      {{{"hidden_activation", "gelu"}}, "is not gelu_pytorch_tanh"},
      {{{"layer_types", {"full_attention"}}}, "layer_types"},
      {{{"layer_types", {"full_attention", "chunked_attention", "full_attention", "x"}}},
       "layer_types"},
      {{{"sliding_window", 0}}, "sliding_window=0"},
      {{{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}}}}, "rope type yarn"},
      {{{"rope_parameters", {{"rope_type", "default"}}}}, "rope_type"},
      {{{"rope_parameters", json::object()}, {"rope_theta", 1e4}}, "stands beside rope_parameters"},
      {{{"query_pre_attn_scalar", 0}}, "query_pre_attn_scalar=0"},
  };
  for (const auto& [set, message] : kCases) {
    const absl::Status status = LoadConfig(PatchedConfig("gemma3_text", set)).status();
    EXPECT_FALSE(status.ok()) << set;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(message));
  }
  // Fields of Gemma's are no others'.
  EXPECT_FALSE(LoadConfig(PatchedConfig("llama", {{"query_pre_attn_scalar", 256}})).ok());
}

}  // namespace
}  // namespace carrel::model
