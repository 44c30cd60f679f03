// What:   config.json of a Hugging Face checkpoint, reduced to what the forward pass needs. What is
//         not understood is refused by name.
// Source: the config classes of transformers (LlamaConfig, MistralConfig, Qwen2Config,
//         Qwen3Config, Qwen3MoeConfig, Gemma3TextConfig), their defaults included; but the sizes that it always writes must be there.
// Errors: NotFound no config.json; InvalidArgument malformed or inconsistent (names field, value,
//         bound); Unimplemented an architecture, activation or rope type that we do not run, or a
//         field that is neither understood nor one that changes nothing (field_rules.h; names it).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"

namespace carrel::model {

enum class Architecture : uint8_t {
  kLlama = 0,
  kMistral = 1,
  kQwen2 = 2,
  kQwen3 = 3,
  kQwen3Moe = 4,
  kGemma3 = 5
};

enum class RopeType : uint8_t { kDefault = 0, kLinear = 1, kLlama3 = 2, kYarn = 3 };

struct RopeConfig {
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  double factor = 1.0;                           // linear, llama3, yarn
  double low_freq_factor = 0;                    // llama3
  double high_freq_factor = 0;                   // llama3
  int64_t original_max_position_embeddings = 0;  // llama3, yarn
  double attention_factor = 1.0;                 // yarn: of cosines and sines
  double beta_fast = 32.0;                       // yarn: turns over the original length from which
                                                 // on a frequency stays as it is
  double beta_slow = 1.0;                        // yarn: and up to which it is divided by factor
  bool truncate = true;                          // yarn: these bounds in whole dimensions

  bool operator==(const RopeConfig&) const = default;
};

// Layers whose MLP is a choice among several (mixture of experts).
struct ExpertsConfig {
  int64_t count = 0;  // 0: no layer has them
  int64_t per_token = 0;
  int64_t intermediate_size = 0;
  bool normalize = false;             // the weights of a token's experts add up to 1
  int64_t every = 1;                  // layers every - 1, 2 every - 1, ... have them,
  std::vector<int32_t> dense_layers;  // but for these; ascending

  bool In(Layer layer) const;
};

// Layers that see the last tokens alone.
struct SlidingConfig {
  int64_t window = 0;           // tokens, the one that looks included; 0: no layer slides
  std::vector<int32_t> layers;  // that do; ascending
  RopeConfig rope;              // theirs

  bool In(Layer layer) const;
};

struct ModelConfig {
  Architecture architecture = Architecture::kLlama;
  AttentionShape shape;  // layers, q_heads, kv_heads, head_dim
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t max_position_embeddings = 0;
  // Tokens of a window that is not run, as layers of Mistral v0.1 and some of Qwen's have it: up to so
  // many, attention over all of them is the model's. 0: no such window.
  int64_t window_limit = 0;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;     // Qwen2; Llama and Qwen3 with attention_bias
  bool output_bias = false;  // Llama and Qwen3 with attention_bias
  bool mlp_bias = false;     // Llama with mlp_bias
  bool qk_norm = false;      // Qwen3: RMS norm of each head's q and k before RoPE
  // Gemma: gates are GELU instead of SiLU; norms multiply by 1 + weight; what attention and MLP add is
  // normalised first; embeddings are multiplied by sqrt(hidden_size).
  bool gemma = false;
  double query_scalar = 0;  // scores are divided by its root; 0: head_dim
  RopeConfig rope;          // of layers that do not slide
  SlidingConfig sliding;
  ExpertsConfig experts;
  // Each from generation_config.json where it says so, else from config.json. A Checkpoint has more ends
  // behind these (special_tokens.h).
  std::vector<TokenId> eos_token_ids;  // may be empty
  std::vector<TokenId>
      overruled_eos_ids;      // config.json's, where generation_config.json has its own
  TokenId bos_token_id = -1;  // -1: none

  // Tokens of document, prompt and answer together. beyond_trained: positions may exceed
  // max_position_embeddings, but never a window.
  int64_t MaxTokens(bool beyond_trained = false) const;
  const char* MaxTokensField(bool beyond_trained = false) const;  // that says so
  // InvalidArgument where `tokens` are more; names `what`, both numbers, and which bound it is. advice: what
  // can be done about max_position_embeddings.
  absl::Status CheckTokens(int64_t tokens, absl::string_view what, bool beyond_trained,
                           absl::string_view advice = "") const;

  // Tokens that a layer attends to, the newest ones, the one that looks included; 0: all.
  int64_t Window(Layer layer) const { return sliding.In(layer) ? sliding.window : 0; }
  std::vector<int64_t> Windows() const;  // of each layer; empty where none slides
  const RopeConfig& RopeOf(Layer layer) const { return sliding.In(layer) ? sliding.rope : rope; }

  // Name and value of every field that changes K, V or the logits, ordered by name: the config part
  // of a fingerprint.
  std::vector<std::pair<std::string, std::string>> FingerprintFields() const;
};

// inv_freq [head_dim / 2] of the rope kind (linear: divided by factor; llama3, yarn: by wavelength),
// computed as transformers does, in float. Who rotates with yarn's multiplies q and k by
// attention_factor, too.
std::vector<float> RopeInvFreq(const RopeConfig& rope, int32_t head_dim);

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_dir);

}  // namespace carrel::model
