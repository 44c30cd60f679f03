#include "model/field_rules.h"

#include <cmath>

#include "common/test_util.h"
#include "model/test_configs.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;

absl::Status Load(const char* model_type, const char* name, const json& value) {
  return LoadConfig(PatchedConfig(model_type, {{name, value}})).status();
}

// None, one times, training, names of tokens.
TEST(FieldRulesTest, WhatSaysThatThereIsNothing_IsTaken) {
  const std::pair<const char*, json> fields[] = {
      {"shared_expert_intermediate_size", 0},
      {"num_experts_per_tok", 0},
      {"num_local_experts", 0},
      {"n_shared_experts", 0},
      {"num_nextn_predict_layers", 0.0},
      {"a_count_of_tomorrow", 0},
      {"router_jitter_noise", 0.1},
      {"embedding_dropout", 0.1},
      {"z_loss_coef", 1e-4},
      {"embedding_multiplier", 1.0},
      {"residual_multiplier", 1},
      {"logits_scaling", 1.0},
      {"logit_scale", 1.0},
      {"routed_scaling_factor", 1.0},
      {"mlp_multipliers", {1.0, 1.0}},
      {"image_token_id", 151655},
      {"vision_start_token_id", 7},
      {"eos_token", "</s>"},
      {"quantization_config", json::object()},
      {"use_rope", true},
      {"position_embedding_type", "rope"},
      {"attention_multiplier", 0.125},  // the root of head_dim=64 as it is
      {"query_pre_attn_scalar", 64},
      {"v_head_dim", 64},
      {"qk_layernorm", false},
  };
  for (const auto& [name, value] : fields) {
    CARREL_EXPECT_OK(Load("llama", name, value)) << name << value;
  }
  for (const char* model_type : {"qwen3", "gemma3_text"}) {
    CARREL_EXPECT_OK(Load(model_type, "use_qk_norm", true));
  }
}

// Values that look like nothing and are not.
TEST(FieldRulesTest, WhatCouldChangeResults_IsRefusedByName) {
  const std::pair<const char*, json> fields[] = {
      {"attention_multiplier", 1.0},  // the scale of scores itself
      {"attention_multiplier", 0},
      {"softmax_scale", 1.0},
      {"query_pre_attn_scalar", 256},
      {"scale_depth", 1.0},
      {"embedding_multiplier", 0},
      {"logit_scale", 0.0},
      {"final_logit_softcapping", 0.0},
      {"clip_qkv", 0},
      {"swiglu_limit", 0},
      {"rotary_pct", 0},
      {"router_temperature", 0},
      {"no_rope_layers", {0, 0, 0, 0}},
      {"no_rope_layer_interval", 0},
      {"mlp_multipliers", {1.0, 0.5}},
      {"an_exponent", 1},
      {"num_experts_per_token", 8},
      {"token_dropout", true},
      {"use_rope", false},
      {"causal", false},
      {"use_rms_norm", false},
      {"position_embedding_type", "alibi"},
      {"use_qk_norm", true},
      {"qkv_bias", true},
      {"v_head_dim", 32},
      {"original_max_position_embeddings", 1024},
  };
  for (const auto& [name, value] : fields) {
    EXPECT_THAT(Load("llama", name, value), StatusIs(absl::StatusCode::kUnimplemented, name))
        << value;
  }
}

}  // namespace
}  // namespace carrel::model
