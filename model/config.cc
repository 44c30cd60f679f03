#include "model/config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <utility>

#include "absl/strings/str_join.h"
#include "common/file.h"
#include "common/json.h"
#include "common/status.h"
#include "model/field_rules.h"
#include "model/gguf_config.h"
#include "model/rope_config.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;

// What transformers assumes where config.json is silent (null and absent differ for some fields).
struct ArchitectureTraits {
  Architecture architecture;
  const char* model_type;
  const char* class_name;
  int64_t kv_heads;  // 0: as many as q heads
  int64_t head_dim;  // 0: hidden_size / num_attention_heads
  int64_t max_position_embeddings;
  int64_t sliding_window;  // 0: none
  TokenId bos_token_id;    // -1: none
  TokenId eos_token_id;
  bool reads_attention_bias;
  bool reads_mlp_bias;
  bool window_is_optional;  // sliding_window counts with use_sliding_window alone
};

constexpr ArchitectureTraits kArchitectures[] = {
    {Architecture::kLlama, "llama", "LlamaForCausalLM", 0, 0, 2048, 0, 1, 2, true, true, false},
    {Architecture::kMistral, "mistral", "MistralForCausalLM", 8, 0, 131072, 4096, 1, 2, false,
     false, false},
    {Architecture::kQwen2, "qwen2", "Qwen2ForCausalLM", 32, 0, 32768, 4096, -1, -1, false, false,
     true},
    {Architecture::kQwen3, "qwen3", "Qwen3ForCausalLM", 32, 128, 32768, 4096, -1, -1, true, false,
     true},
    {Architecture::kQwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM", 4, 0, 32768, 4096, -1, -1, true,
     false, true},
    {Architecture::kGemma3, "gemma3_text", "Gemma3ForCausalLM", 4, 256, 131072, 4096, 2, 1, true,
     false, false},
};

absl::StatusOr<const ArchitectureTraits*> ParseArchitecture(const JsonFields& fields) {
  ASSIGN_OR_RETURN(const std::string model_type, fields.String("model_type"));
  const auto* traits =
      std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                   [&](const ArchitectureTraits& t) { return model_type == t.model_type; });
  if (traits == std::end(kArchitectures)) {
    return fields.Unsupported("model_type",
                              "is not one of llama, mistral, qwen2, qwen3, qwen3_moe, gemma3_text");
  }
  if (const json* classes = fields.Find("architectures")) {
    if (!classes->is_array()) return fields.Invalid("architectures", "is not an array");
    if (classes->size() != 1 || (*classes)[0] != traits->class_name) {
      return fields.Unsupported("architectures",
                                absl::StrCat("is not [\"", traits->class_name,
                                             "\"], the class run for model_type ", model_type));
    }
  }
  return traits;
}

absl::Status ParseShape(const JsonFields& fields, const ArchitectureTraits& traits,
                        ModelConfig& config) {
  ASSIGN_OR_RETURN(const int64_t layers, fields.Int("num_hidden_layers", 1, kMaxLayers));
  ASSIGN_OR_RETURN(const int64_t q_heads, fields.Int("num_attention_heads", 1, kMaxHeads));
  const bool as_many = traits.kv_heads == 0 || fields.IsNull("num_key_value_heads");
  ASSIGN_OR_RETURN(
      const int64_t kv_heads,
      fields.IntOr("num_key_value_heads", as_many ? q_heads : traits.kv_heads, 1, kMaxHeads));
  if (q_heads % kv_heads != 0) {
    return fields.Invalid("num_attention_heads",
                          absl::StrCat("is not a multiple of num_key_value_heads=", kv_heads));
  }
  ASSIGN_OR_RETURN(config.vocab_size, fields.Int("vocab_size", 1, kMaxVocab));
  ASSIGN_OR_RETURN(config.hidden_size, fields.Int("hidden_size", 1, kMaxWidth));
  ASSIGN_OR_RETURN(config.intermediate_size, fields.Int("intermediate_size", 1, kMaxIntermediate));
  ASSIGN_OR_RETURN(
      config.max_position_embeddings,
      fields.IntOr("max_position_embeddings", traits.max_position_embeddings, 1, kMaxPositions));
  int64_t head_dim = traits.head_dim;
  if (fields.Has("head_dim")) {
    ASSIGN_OR_RETURN(head_dim, fields.Int("head_dim", 2, kMaxHeadDim));
  } else if (head_dim == 0 || fields.IsNull("head_dim")) {
    if (config.hidden_size % q_heads != 0) {
      return fields.Invalid("hidden_size", absl::StrCat("is not a multiple of num_attention_heads=",
                                                        q_heads, " and head_dim is not given"));
    }
    head_dim = config.hidden_size / q_heads;
  }
  if (head_dim % 2 != 0 || head_dim < 2 || head_dim > kMaxHeadDim) {
    return absl::InvalidArgumentError(absl::StrCat(fields.where(), ": head_dim=", head_dim,
                                                   " is not an even number in [2, ", kMaxHeadDim,
                                                   "]"));
  }
  config.shape = {static_cast<int32_t>(layers), static_cast<int32_t>(q_heads),
                  static_cast<int32_t>(kv_heads), static_cast<int32_t>(head_dim)};
  return absl::OkStatus();
}

// The layers that layer_types, which is there, calls sliding.
absl::StatusOr<std::vector<int32_t>> SlidingLayers(const JsonFields& fields, int32_t layers) {
  const json& types = *fields.Find("layer_types");
  if (!types.is_array() || static_cast<int32_t>(types.size()) != layers) {
    return fields.Invalid(
        "layer_types", absl::StrCat("is not an array of num_hidden_layers=", layers, " entries"));
  }
  std::vector<int32_t> sliding;
  for (int32_t i = 0; i < layers; ++i) {
    const json& type = types[static_cast<size_t>(i)];
    if (type == "sliding_attention") {
      sliding.push_back(i);
    } else if (type != "full_attention") {
      return fields.Unsupported("layer_types",
                                "holds something other than full_attention, sliding_attention");
    }
  }
  return sliding;
}

// Whether some layer has the window: those that layer_types calls sliding, or without it all, and of
// Qwen's the ones from max_window_layers on.
absl::StatusOr<bool> SomeLayerSlides(const JsonFields& fields, const ArchitectureTraits& traits,
                                     const ModelConfig& config) {
  if (fields.Has("layer_types")) {
    ASSIGN_OR_RETURN(const std::vector<int32_t> sliding,
                     SlidingLayers(fields, config.shape.layers));
    // Mistral's class does not read it.
    if (traits.window_is_optional) return !sliding.empty();
  }
  // Of a mixture of experts, each layer has it.
  if (!traits.window_is_optional || traits.architecture == Architecture::kQwen3Moe) return true;
  ASSIGN_OR_RETURN(const int64_t from, fields.IntOr("max_window_layers", 28, 0, INT64_MAX));
  return from < config.shape.layers;
}

// A window of a family whose layers are run with attention over all tokens: the same up to its length.
absl::Status ParseWindowLimit(const JsonFields& fields, const ArchitectureTraits& traits,
                              ModelConfig& config) {
  ASSIGN_OR_RETURN(const bool slides, SomeLayerSlides(fields, traits, config));
  ASSIGN_OR_RETURN(const bool used, fields.BoolOr("use_sliding_window", false));
  if (traits.window_is_optional && !used) {
    if (!slides || !fields.Has("layer_types")) return absl::OkStatus();
    return fields.Unsupported("layer_types", "holds sliding_attention, without use_sliding_window");
  }
  if (!slides) return absl::OkStatus();
  const int64_t fallback = fields.IsNull("sliding_window") ? 0 : traits.sliding_window;
  ASSIGN_OR_RETURN(config.window_limit, fields.IntOr("sliding_window", fallback, 0, INT64_MAX));
  return absl::OkStatus();
}

// Which layers slide: layer_types, or every one but each sliding_window_pattern-th.
absl::Status ParseSliding(const JsonFields& fields, const ArchitectureTraits& traits,
                          ModelConfig& config) {
  SlidingConfig& sliding = config.sliding;
  ASSIGN_OR_RETURN(sliding.window,
                   fields.IntOr("sliding_window", traits.sliding_window, 1, kMaxPositions));
  constexpr int64_t kPattern = 6;
  ASSIGN_OR_RETURN(const int64_t pattern,
                   fields.IntOr("sliding_window_pattern", kPattern, 1, kMaxLayers));
  if (fields.Has("layer_types")) {
    ASSIGN_OR_RETURN(sliding.layers, SlidingLayers(fields, config.shape.layers));
    return absl::OkStatus();
  }
  for (int32_t i = 0; i < config.shape.layers; ++i) {
    if ((i + 1) % pattern != 0) sliding.layers.push_back(i);
  }
  return absl::OkStatus();
}

absl::Status ParseGemma(const JsonFields& fields, const ArchitectureTraits& traits,
                        ModelConfig& config) {
  config.gemma = true;
  RETURN_IF_ERROR(ParseSliding(fields, traits, config));
  ASSIGN_OR_RETURN(const LayeredRope rope,
                   ParseLayeredRope(fields, config.max_position_embeddings));
  config.rope = rope.full;
  config.sliding.rope = rope.sliding;
  ASSIGN_OR_RETURN(config.query_scalar, fields.NumberOr("query_pre_attn_scalar", 256.0, 1e-3, 1e6));
  return absl::OkStatus();
}

absl::Status ParseBiases(const JsonFields& fields, const ArchitectureTraits& traits,
                         ModelConfig& config) {
  ASSIGN_OR_RETURN(const bool attention_bias, fields.BoolOr("attention_bias", false));
  ASSIGN_OR_RETURN(const bool mlp_bias, fields.BoolOr("mlp_bias", false));
  // Qwen2 always has biases on q, k, v and never on the output, whatever the field says; true is
  // refused since it would mean something else.
  if (attention_bias && !traits.reads_attention_bias) {
    return fields.Unsupported("attention_bias",
                              absl::StrCat("is not an option of model_type ", traits.model_type));
  }
  if (mlp_bias && !traits.reads_mlp_bias) {
    return fields.Unsupported("mlp_bias",
                              absl::StrCat("is not an option of model_type ", traits.model_type));
  }
  config.qkv_bias = attention_bias || traits.architecture == Architecture::kQwen2;
  config.output_bias = attention_bias;
  config.mlp_bias = mlp_bias;
  config.qk_norm = traits.architecture == Architecture::kQwen3 ||
                   traits.architecture == Architecture::kQwen3Moe ||
                   traits.architecture == Architecture::kGemma3;
  return absl::OkStatus();
}

absl::Status ParseExperts(const JsonFields& fields, ModelConfig& config) {
  ExpertsConfig& experts = config.experts;
  // transformers 5 writes num_local_experts.
  const char* const count = fields.Has("num_experts") ? "num_experts" : "num_local_experts";
  ASSIGN_OR_RETURN(experts.count, fields.Int(count, 1, kMaxExperts));
  ASSIGN_OR_RETURN(const int64_t same,
                   fields.IntOr("num_local_experts", experts.count, 1, kMaxExperts));
  if (same != experts.count) return fields.Invalid("num_local_experts", "contradicts num_experts");
  ASSIGN_OR_RETURN(experts.per_token, fields.Int("num_experts_per_tok", 1,
                                                 std::min(experts.count, kMaxExpertsPerToken)));
  ASSIGN_OR_RETURN(experts.intermediate_size,
                   fields.Int("moe_intermediate_size", 1, kMaxIntermediate));
  ASSIGN_OR_RETURN(experts.normalize, fields.BoolOr("norm_topk_prob", false));
  ASSIGN_OR_RETURN(experts.every, fields.IntOr("decoder_sparse_step", 1, 1, kMaxLayers));
  const json* dense = fields.Find("mlp_only_layers");
  if (dense == nullptr) return absl::OkStatus();
  if (!dense->is_array()) return fields.Invalid("mlp_only_layers", "is not an array");
  for (const json& layer : *dense) {
    if (!layer.is_number_unsigned() ||
        layer.get<uint64_t>() >= static_cast<uint64_t>(config.shape.layers)) {
      return fields.Invalid("mlp_only_layers", absl::StrCat("holds something that is no layer in ",
                                                            "[0, ", config.shape.layers, ")"));
    }
    experts.dense_layers.push_back(layer.get<int32_t>());
  }
  std::sort(experts.dense_layers.begin(), experts.dense_layers.end());
  return absl::OkStatus();
}

absl::Status RefuseOthers(const JsonFields& fields, const ArchitectureTraits& traits) {
  const bool gemma = traits.architecture == Architecture::kGemma3;
  // hidden_act is what older files of Gemma say, too, and what nobody reads there.
  const char* const field = gemma ? "hidden_activation" : "hidden_act";
  const json* activation = fields.Find(field);
  if (activation != nullptr && gemma && *activation != "gelu_pytorch_tanh") {
    return fields.Unsupported(field, "is not gelu_pytorch_tanh");
  }
  if (activation != nullptr && !gemma && *activation != "silu" && *activation != "swish") {
    return fields.Unsupported(field, "is not silu");
  }
  ASSIGN_OR_RETURN(const bool causal, fields.BoolOr("is_causal", true));
  if (!causal) return fields.Unsupported("is_causal", "is not run: tokens see what precedes them");
  for (const char* field : {"quantization_config", "compression_config"}) {
    const json* scheme = fields.Find(field);
    if (scheme != nullptr && !(scheme->is_structured() && scheme->empty())) {
      return fields.Unsupported(field, "is not run: weights must be f32, f16 or bf16");
    }
  }
  return absl::OkStatus();
}

absl::Status RefuseUnknown(const JsonFields& fields, const ModelConfig& config) {
  const std::vector<Fact> facts = FactsOf(config);
  for (const auto& [name, value] : fields.object().items()) {
    if (IsKnownField(config.architecture, name)) continue;
    if (ChangesNothing(name, ToFieldValue(value), facts)) continue;
    return fields.Unsupported(name, "is not understood, and could change results");
  }
  return absl::OkStatus();
}

// An id or a list of ids.
absl::StatusOr<std::vector<TokenId>> ParseTokenIds(const JsonFields& fields, const char* name,
                                                   int64_t vocab_size) {
  const json* value = fields.Find(name);
  const json one_element = value->is_array() ? json() : json::array({*value});
  const json& list = value->is_array() ? *value : one_element;
  std::vector<TokenId> ids;
  for (const json& id : list) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(vocab_size)) {
      return fields.Invalid(
          name, absl::StrCat("is not a token id, or list of them, in [0, ", vocab_size, ")"));
    }
    ids.push_back(id.get<TokenId>());
  }
  return ids;
}

// What one file says of eos and bos, where no file before it did.
absl::Status ReadSpecialTokens(const JsonFields& fields, ModelConfig& config) {
  if (fields.Has("eos_token_id")) {
    ASSIGN_OR_RETURN(std::vector<TokenId> ids,
                     ParseTokenIds(fields, "eos_token_id", config.vocab_size));
    (config.eos_token_ids.empty() ? config.eos_token_ids : config.overruled_eos_ids) =
        std::move(ids);
  }
  if (fields.Has("bos_token_id")) {
    ASSIGN_OR_RETURN(const std::vector<TokenId> bos,
                     ParseTokenIds(fields, "bos_token_id", config.vocab_size));
    if (bos.size() != 1) return fields.Invalid("bos_token_id", "is not one token id");
    if (config.bos_token_id < 0) config.bos_token_id = bos[0];
  }
  return absl::OkStatus();
}

absl::Status ParseSpecialTokens(const std::filesystem::path& folder, const JsonFields& fields,
                                const ArchitectureTraits& traits, ModelConfig& config) {
  const std::string path = (folder / "generation_config.json").string();
  absl::StatusOr<std::string> text = ReadFile(path);
  if (text.ok()) {
    ASSIGN_OR_RETURN(const json object, ParseJsonObject(*text, path));
    RETURN_IF_ERROR(ReadSpecialTokens(JsonFields(path, object), config));
  } else if (!absl::IsNotFound(text.status())) {
    return text.status();
  }
  RETURN_IF_ERROR(ReadSpecialTokens(fields, config));
  // The class default holds only where the field is absent, and only if it is a token at all.
  const auto holds = [&](const char* name, TokenId id) {
    return !fields.IsNull(name) && id >= 0 && id < config.vocab_size;
  };
  if (config.bos_token_id < 0 && holds("bos_token_id", traits.bos_token_id)) {
    config.bos_token_id = traits.bos_token_id;
  }
  if (config.eos_token_ids.empty() && holds("eos_token_id", traits.eos_token_id)) {
    config.eos_token_ids = {traits.eos_token_id};
  }
  return absl::OkStatus();
}

// The fewest digits that read back as x; whole numbers without an exponent.
std::string Shortest(double x) {
  if (std::abs(x) < 1e15 && x == std::floor(x)) return absl::StrCat(static_cast<int64_t>(x));
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), x);
  CARREL_CHECK(error == std::errc());
  return std::string(buffer, end);
}

}  // namespace

const char* RopeTypeName(RopeType type) {
  static constexpr const char* kNames[] = {"default", "linear", "llama3", "yarn"};
  return kNames[static_cast<size_t>(type)];
}

namespace {

// A folder into which GGUF files were downloaded is no checkpoint: one of them is meant.
absl::Status CheckNotOnlyGguf(const std::filesystem::path& folder) {
  std::error_code error;
  if (std::filesystem::exists(folder / "config.json", error)) return absl::OkStatus();
  std::filesystem::directory_iterator it(folder, error);
  for (const std::filesystem::directory_iterator end; !error && it != end; it.increment(error)) {
    if (it->path().extension() != ".gguf") continue;
    return absl::InvalidArgumentError(absl::StrCat("model folder ", folder.string(),
                                                   " has no config.json, but GGUF files: give "
                                                   "one of them, as ",
                                                   it->path().string()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_dir) {
  if (IsGgufPath(model_dir)) {
    ASSIGN_OR_RETURN(const std::shared_ptr<const Gguf> gguf, Gguf::Open(model_dir));
    return GgufModelConfig(*gguf);
  }
  const std::filesystem::path folder(model_dir);
  const std::string path = (folder / "config.json").string();
  RETURN_IF_ERROR(CheckNotOnlyGguf(folder));
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  ASSIGN_OR_RETURN(const json object, ParseJsonObject(text, path));
  const JsonFields fields(path, object);

  ASSIGN_OR_RETURN(const ArchitectureTraits* traits, ParseArchitecture(fields));
  RETURN_IF_ERROR(RefuseOthers(fields, *traits));
  ModelConfig config;
  config.architecture = traits->architecture;
  RETURN_IF_ERROR(ParseShape(fields, *traits, config));
  if (traits->architecture == Architecture::kQwen3Moe) {
    RETURN_IF_ERROR(ParseExperts(fields, config));
  }
  const bool gemma = traits->architecture == Architecture::kGemma3;
  if (!gemma) RETURN_IF_ERROR(ParseWindowLimit(fields, *traits, config));
  RETURN_IF_ERROR(ParseBiases(fields, *traits, config));
  ASSIGN_OR_RETURN(config.rms_norm_eps, fields.NumberOr("rms_norm_eps", 1e-6, 1e-12, 1.0));
  ASSIGN_OR_RETURN(config.tie_word_embeddings, fields.BoolOr("tie_word_embeddings", gemma));
  if (gemma) {
    RETURN_IF_ERROR(ParseGemma(fields, *traits, config));
  } else {
    ASSIGN_OR_RETURN(config.rope, ParseRopeConfig(fields, config.max_position_embeddings));
  }
  RETURN_IF_ERROR(RefuseUnknown(fields, config));
  RETURN_IF_ERROR(ParseSpecialTokens(folder, fields, *traits, config));
  return config;
}

int64_t ModelConfig::MaxTokens(bool beyond_trained) const {
  const int64_t trained = beyond_trained ? INT64_MAX : max_position_embeddings;
  return window_limit == 0 ? trained : std::min(trained, window_limit);
}

const char* ModelConfig::MaxTokensField(bool beyond_trained) const {
  return MaxTokens(beyond_trained) == window_limit ? "sliding_window" : "max_position_embeddings";
}

absl::Status ModelConfig::CheckTokens(int64_t tokens, absl::string_view what, bool beyond_trained,
                                      absl::string_view advice) const {
  if (tokens <= MaxTokens(beyond_trained)) return absl::OkStatus();
  if (window_limit != 0 && tokens > window_limit) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": ", tokens, " tokens exceed the model's sliding_window=", window_limit,
        " (max_position_embeddings=", max_position_embeddings,
        "): beyond it a token sees the last ", window_limit, " alone, which is not run"));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      what, ": ", tokens,
      " tokens exceed the model's max_position_embeddings=", max_position_embeddings, advice));
}

bool SlidingConfig::In(Layer layer) const {
  return window > 0 && std::binary_search(layers.begin(), layers.end(), layer.value());
}

std::vector<int64_t> ModelConfig::Windows() const {
  std::vector<int64_t> windows;
  if (sliding.window == 0 || sliding.layers.empty()) return windows;
  for (int32_t i = 0; i < shape.layers; ++i) windows.push_back(Window(Layer(i)));
  return windows;
}

bool ExpertsConfig::In(Layer layer) const {
  return count > 0 && (layer.value() + 1) % every == 0 &&
         !std::binary_search(dense_layers.begin(), dense_layers.end(), layer.value());
}

std::vector<std::pair<std::string, std::string>> ModelConfig::FingerprintFields() const {
  const auto flag = [](bool value) { return std::string(value ? "true" : "false"); };
  const auto* traits =
      std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                   [this](const ArchitectureTraits& t) { return t.architecture == architecture; });
  CARREL_CHECK(traits != std::end(kArchitectures));
  std::vector<std::pair<std::string, std::string>> fields = {
      {"architecture", traits->model_type},
      {"head_dim", absl::StrCat(shape.head_dim)},
      {"hidden_size", absl::StrCat(hidden_size)},
      {"intermediate_size", absl::StrCat(intermediate_size)},
      {"kv_heads", absl::StrCat(shape.kv_heads)},
      {"layers", absl::StrCat(shape.layers)},
      {"mlp_bias", flag(mlp_bias)},
      {"output_bias", flag(output_bias)},
      {"q_heads", absl::StrCat(shape.q_heads)},
      {"qk_norm", flag(qk_norm)},
      {"qkv_bias", flag(qkv_bias)},
      {"rms_norm_eps", Shortest(rms_norm_eps)},
      {"rope_factor", Shortest(rope.factor)},
      {"rope_high_freq_factor", Shortest(rope.high_freq_factor)},
      {"rope_low_freq_factor", Shortest(rope.low_freq_factor)},
      {"rope_original_max_position_embeddings",
       absl::StrCat(rope.original_max_position_embeddings)},
      {"rope_theta", Shortest(rope.theta)},
      {"rope_type", RopeTypeName(rope.type)},
      {"tie_word_embeddings", flag(tie_word_embeddings)},
      {"vocab_size", absl::StrCat(vocab_size)},
  };
  // Only where they mean something: contexts of other models keep the fingerprint that they have.
  if (rope.type == RopeType::kYarn) {
    fields.emplace_back("rope_attention_factor", Shortest(rope.attention_factor));
    fields.emplace_back("rope_beta_fast", Shortest(rope.beta_fast));
    fields.emplace_back("rope_beta_slow", Shortest(rope.beta_slow));
    fields.emplace_back("rope_truncate", flag(rope.truncate));
  }
  if (gemma) {
    fields.emplace_back("query_scalar", Shortest(query_scalar));
    fields.emplace_back("sliding_layers", absl::StrJoin(sliding.layers, ","));
    fields.emplace_back("sliding_rope_factor", Shortest(sliding.rope.factor));
    fields.emplace_back("sliding_rope_theta", Shortest(sliding.rope.theta));
    fields.emplace_back("sliding_rope_type", RopeTypeName(sliding.rope.type));
    fields.emplace_back("sliding_window", absl::StrCat(sliding.window));
  }
  if (experts.count > 0) {
    fields.emplace_back("experts", absl::StrCat(experts.count));
    fields.emplace_back("experts_dense_layers", absl::StrJoin(experts.dense_layers, ","));
    fields.emplace_back("experts_every", absl::StrCat(experts.every));
    fields.emplace_back("experts_intermediate_size", absl::StrCat(experts.intermediate_size));
    fields.emplace_back("experts_normalize", flag(experts.normalize));
    fields.emplace_back("experts_per_token", absl::StrCat(experts.per_token));
  }
  std::sort(fields.begin(), fields.end());
  return fields;
}

}  // namespace carrel::model
