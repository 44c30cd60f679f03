#include "model/gguf_config.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/status.h"
#include "model/field_rules.h"

namespace carrel::model {
namespace {

struct ArchitectureName {
  const char* name;
  Architecture architecture;
};
constexpr ArchitectureName kArchitectures[] = {{"llama", Architecture::kLlama},
                                               {"qwen2", Architecture::kQwen2},
                                               {"qwen3", Architecture::kQwen3},
                                               {"qwen3moe", Architecture::kQwen3Moe},
                                               {"gemma3", Architecture::kGemma3}};

// Llama 3's rope scaling as every published model has it, but for the factor.
constexpr double kLlama3LowFreqFactor = 1.0;
constexpr double kLlama3HighFreqFactor = 4.0;
constexpr int64_t kLlama3TrainedLength = 8192;

// Keys of the architecture that are read below; rope.scaling.finetuned says how the model was trained,
// nothing to compute. And those of Gemma's.
constexpr absl::string_view kReadKeys =
    "attention.head_count attention.head_count_kv attention.key_length "
    "attention.layer_norm_rms_epsilon attention.sliding_window attention.value_length "
    "block_count context_length embedding_length expert_count expert_feed_forward_length "
    "expert_used_count expert_weights_norm feed_forward_length rope.dimension_count "
    "rope.freq_base rope.scale_linear rope.scaling.attn_factor rope.scaling.factor "
    "rope.scaling.finetuned rope.scaling.original_context_length rope.scaling.type "
    "rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow "
    "rope.scaling.yarn_ext_factor tensor_data_layout vocab_size";
constexpr absl::string_view kGemmaKeys =
    "attention.scale attention.sliding_window_pattern rope.freq_base_swa";

// A value as the rules of fields have it.
FieldValue ToFieldValue(const GgufMetadata& metadata, const std::string& key) {
  const GgufValue& value = *metadata.Find(key);
  switch (value.type) {
    case GgufValueType::kBool:
      return value.bytes[0] != 0;
    case GgufValueType::kString:
      if (value.bytes.empty()) return {};
      return std::string(value.bytes);
    case GgufValueType::kArray:
      if (value.count == 0) return {};
      return Something();
    default:
      break;
  }
  const auto number = metadata.Number(key, -HUGE_VAL, HUGE_VAL);
  if (!number.ok()) return Something();
  return *number;
}

class Parser {
 public:
  explicit Parser(const Gguf& gguf) : gguf_(gguf), metadata_(gguf.metadata()) {}

  absl::StatusOr<ModelConfig> Run() {
    RETURN_IF_ERROR(ParseArchitecture());
    RETURN_IF_ERROR(ParseShape());
    if (has_experts()) RETURN_IF_ERROR(ParseExperts());
    RETURN_IF_ERROR(ParseOthers());
    ASSIGN_OR_RETURN(config_.rms_norm_eps,
                     metadata_.Number(Key("attention.layer_norm_rms_epsilon"), 1e-12, 1.0));
    config_.tie_word_embeddings = gguf_.Find("output.weight") == nullptr;
    config_.qkv_bias = gguf_.Find("blk.0.attn_q.bias") != nullptr;
    config_.output_bias = gguf_.Find("blk.0.attn_output.bias") != nullptr;
    config_.mlp_bias = gguf_.Find("blk.0.ffn_gate.bias") != nullptr;
    config_.gemma = config_.architecture == Architecture::kGemma3;
    config_.qk_norm =
        config_.architecture == Architecture::kQwen3 || has_experts() || config_.gemma;
    RETURN_IF_ERROR(ParseRope());
    if (config_.gemma) RETURN_IF_ERROR(ParseGemma());
    RETURN_IF_ERROR(RefuseUnknown());
    RETURN_IF_ERROR(ParseSpecialTokens());
    return std::move(config_);
  }

 private:
  bool has_experts() const { return config_.architecture == Architecture::kQwen3Moe; }
  std::string Key(absl::string_view name) const { return absl::StrCat(prefix_, name); }

  absl::Status ParseArchitecture() {
    ASSIGN_OR_RETURN(const std::string name, metadata_.String("general.architecture"));
    const auto* known = std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                                     [&](const ArchitectureName& a) { return name == a.name; });
    if (known == std::end(kArchitectures)) {
      return metadata_.Unsupported("general.architecture",
                                   "is not one of llama, qwen2, qwen3, qwen3moe, gemma3");
    }
    config_.architecture = known->architecture;
    prefix_ = name + ".";
    return absl::OkStatus();
  }

  // Every key of the architecture is either read below, or changes nothing (field_rules.h): an ignored one
  // could change the answers. Those of other sections say where the model comes from, or are the
  // tokenizer's.
  absl::Status RefuseUnknown() const {
    using Words = absl::flat_hash_set<absl::string_view>;
    static const auto* const kRead = new Words(absl::StrSplit(kReadKeys, ' '));
    static const auto* const kReadOfGemma = new Words(absl::StrSplit(kGemmaKeys, ' '));
    std::vector<Fact> facts = FactsOf(config_);
    facts.insert(facts.end(), {{"attention.causal", true},
                               {"attention.scale", 1 / std::sqrt(config_.shape.head_dim)},
                               {"expert_gating_func", 1.0}});  // softmax
    for (const auto& [key, value] : metadata_.values()) {
      absl::string_view name = key;
      if (!absl::ConsumePrefix(&name, prefix_) || kRead->contains(name)) continue;
      if (config_.gemma && kReadOfGemma->contains(name)) continue;
      if (ChangesNothing(name, ToFieldValue(metadata_, key), facts)) continue;
      return metadata_.Unsupported(key, "is not a key that is understood");
    }
    return absl::OkStatus();
  }

  absl::Status ParseShape() {
    ASSIGN_OR_RETURN(const int64_t layers, metadata_.Int(Key("block_count"), 1, kMaxLayers));
    ASSIGN_OR_RETURN(config_.hidden_size, metadata_.Int(Key("embedding_length"), 1, kMaxWidth));
    ASSIGN_OR_RETURN(config_.intermediate_size, Count("feed_forward_length", kMaxIntermediate));
    ASSIGN_OR_RETURN(const int64_t q_heads, Count("attention.head_count", kMaxHeads));
    int64_t kv_heads = q_heads;
    if (metadata_.Has(Key("attention.head_count_kv"))) {
      ASSIGN_OR_RETURN(kv_heads, Count("attention.head_count_kv", kMaxHeads));
    }
    if (q_heads % kv_heads != 0) {
      return metadata_.Invalid(Key("attention.head_count"),
                               absl::StrCat("is not a multiple of head_count_kv=", kv_heads));
    }
    ASSIGN_OR_RETURN(config_.max_position_embeddings,
                     metadata_.Int(Key("context_length"), 1, kMaxPositions));
    ASSIGN_OR_RETURN(const int64_t head_dim, ParseHeadDim(q_heads));
    ASSIGN_OR_RETURN(config_.vocab_size, ParseVocab());
    config_.shape = {static_cast<int32_t>(layers), static_cast<int32_t>(q_heads),
                     static_cast<int32_t>(kv_heads), static_cast<int32_t>(head_dim)};
    return absl::OkStatus();
  }

  // A number, or one for each layer, which must be the same.
  absl::StatusOr<int64_t> Count(absl::string_view name, int64_t max) const {
    const std::string key = Key(name);
    const GgufValue* value = metadata_.Find(key);
    if (value == nullptr || value->type != GgufValueType::kArray) {
      return metadata_.Int(key, 1, max);
    }
    ASSIGN_OR_RETURN(const std::vector<int64_t> counts, metadata_.Ints(key));
    if (counts.empty() || counts[0] < 1 || counts[0] > max) {
      return metadata_.Invalid(key, absl::StrCat("does not begin with a number in [1, ", max, "]"));
    }
    for (const int64_t count : counts) {
      if (count != counts[0]) {
        return metadata_.Unsupported(key, "differs from layer to layer");
      }
    }
    return counts[0];
  }

  absl::StatusOr<int64_t> ParseHeadDim(int64_t q_heads) const {
    const std::string key = Key("attention.key_length");
    int64_t head_dim = config_.hidden_size / q_heads;
    if (metadata_.Has(key)) {
      ASSIGN_OR_RETURN(head_dim, metadata_.Int(key, 2, kMaxHeadDim));
    } else if (config_.hidden_size % q_heads != 0) {
      return metadata_.Invalid(
          Key("embedding_length"),
          absl::StrCat("is not a multiple of head_count=", q_heads, " and ", key, " is not given"));
    }
    if (head_dim % 2 != 0 || head_dim < 2 || head_dim > kMaxHeadDim) {
      return absl::InvalidArgumentError(absl::StrCat(metadata_.where(), ": head dimension ",
                                                     head_dim, " is not an even number in [2, ",
                                                     kMaxHeadDim, "]"));
    }
    for (const char* name : {"attention.value_length", "rope.dimension_count"}) {
      ASSIGN_OR_RETURN(const int64_t same, metadata_.IntOr(Key(name), head_dim, 1, kMaxHeadDim));
      if (same != head_dim) {
        return metadata_.Unsupported(Key(name), absl::StrCat("is not the head dimension ", head_dim,
                                                             " and nothing else is run"));
      }
    }
    return head_dim;
  }

  // The rows of the embedding; what metadata say must agree.
  absl::StatusOr<int64_t> ParseVocab() const {
    const GgufTensor* embedding = gguf_.Find("token_embd.weight");
    if (embedding == nullptr || embedding->shape.size() != 2 || embedding->shape[0] > kMaxVocab) {
      return absl::InvalidArgumentError(
          absl::StrCat(metadata_.where(), ": tensor \"token_embd.weight\" is not a matrix of 1 to ",
                       kMaxVocab, " rows, or is missing"));
    }
    const int64_t vocab = embedding->shape[0];
    ASSIGN_OR_RETURN(const int64_t said, metadata_.IntOr(Key("vocab_size"), vocab, 1, kMaxVocab));
    if (said != vocab) {
      return metadata_.Invalid(Key("vocab_size"),
                               absl::StrCat("but token_embd.weight has ", vocab, " rows"));
    }
    return vocab;
  }

  // Every layer has them, and unless the file says otherwise the weights of a token's experts add up to 1:
  // what the architecture's name stands for.
  absl::Status ParseExperts() {
    ExpertsConfig& experts = config_.experts;
    ASSIGN_OR_RETURN(experts.count, metadata_.Int(Key("expert_count"), 1, kMaxExperts));
    ASSIGN_OR_RETURN(experts.per_token,
                     metadata_.Int(Key("expert_used_count"), 1,
                                   std::min<int64_t>(experts.count, kMaxExpertsPerToken)));
    ASSIGN_OR_RETURN(experts.intermediate_size,
                     metadata_.Int(Key("expert_feed_forward_length"), 1, kMaxIntermediate));
    ASSIGN_OR_RETURN(experts.normalize, metadata_.BoolOr(Key("expert_weights_norm"), true));
    return absl::OkStatus();
  }

  absl::Status ParseOthers() {
    for (const char* name : {"expert_count", "expert_used_count", "expert_feed_forward_length"}) {
      if (has_experts()) break;
      ASSIGN_OR_RETURN(const int64_t count, metadata_.IntOr(Key(name), 0, 0, INT64_MAX));
      if (count != 0) return metadata_.Unsupported(Key(name), "is not 0: experts are not run");
    }
    // As config.cc has it: attention over all tokens is the same up to the window.
    if (config_.architecture != Architecture::kGemma3) {
      ASSIGN_OR_RETURN(config_.window_limit,
                       metadata_.IntOr(Key("attention.sliding_window"), 0, 0, INT64_MAX));
    }
    if (metadata_.Has(Key("tensor_data_layout"))) {
      ASSIGN_OR_RETURN(const std::string layout, metadata_.String(Key("tensor_data_layout")));
      // What the converter writes for the order of Q's and K's rows that it always uses.
      if (layout != "Meta AI original pth" && layout != "reference") {
        return metadata_.Unsupported(Key("tensor_data_layout"), "is not a layout that is known");
      }
    }
    return absl::OkStatus();
  }

  absl::Status ParseRope() {
    RopeConfig& rope = config_.rope;
    ASSIGN_OR_RETURN(rope.theta,
                     metadata_.NumberOr(Key("rope.freq_base"), 10000.0, 1.0, kMaxTheta));
    std::string type = "none";
    if (metadata_.Has(Key("rope.scaling.type"))) {
      ASSIGN_OR_RETURN(type, metadata_.String(Key("rope.scaling.type")));
    }
    if (type == "yarn") return ParseYarn();
    for (const char* name : {"rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"}) {
      ASSIGN_OR_RETURN(const double factor, metadata_.NumberOr(Key(name), 1.0, 0.0, kMaxFactor));
      if (factor != 1.0) return metadata_.Unsupported(Key(name), "is without a rope of type yarn");
    }
    if (type != "none" && type != "linear") {
      return metadata_.Unsupported(Key("rope.scaling.type"), "is not one of none, linear, yarn");
    }
    const char* factor_name = type == "linear" ? "rope.scaling.factor" : "rope.scale_linear";
    ASSIGN_OR_RETURN(const double factor,
                     metadata_.NumberOr(Key(factor_name), 1.0, 1.0, kMaxFactor));
    if (type == "linear" || factor != 1.0) {
      rope.type = RopeType::kLinear;
      rope.factor = factor;
    } else {
      ASSIGN_OR_RETURN(const double unused,
                       metadata_.NumberOr(Key("rope.scaling.factor"), 1.0, 1.0, kMaxFactor));
      if (unused != 1.0) {
        return metadata_.Invalid(Key("rope.scaling.factor"), "is without a rope.scaling.type");
      }
    }
    const GgufTensor* factors = gguf_.Find(kGgufRopeFactors);
    return factors == nullptr ? absl::OkStatus() : ParseRopeFactors(*factors);
  }

  absl::Status ParseYarn() {
    RopeConfig& rope = config_.rope;
    rope.type = RopeType::kYarn;
    ASSIGN_OR_RETURN(rope.factor, metadata_.Number(Key("rope.scaling.factor"), 1.0, kMaxFactor));
    ASSIGN_OR_RETURN(rope.original_max_position_embeddings,
                     metadata_.IntOr(Key("rope.scaling.original_context_length"),
                                     config_.max_position_embeddings, 1, kMaxPositions));
    const auto bound = [&](const char* name, double& value) -> absl::Status {
      ASSIGN_OR_RETURN(value, metadata_.NumberOr(Key(name), value, 1e-6, kMaxFactor));
      return absl::OkStatus();
    };
    RETURN_IF_ERROR(bound("rope.scaling.yarn_beta_fast", rope.beta_fast));
    RETURN_IF_ERROR(bound("rope.scaling.yarn_beta_slow", rope.beta_slow));
    if (rope.beta_fast < rope.beta_slow) {
      return metadata_.Invalid(Key("rope.scaling.yarn_beta_fast"),
                               absl::StrCat("is below yarn_beta_slow=", rope.beta_slow));
    }
    rope.attention_factor = 0.1 * std::log(rope.factor) + 1.0;
    RETURN_IF_ERROR(CheckYarnFactors());
    if (gguf_.Find(kGgufRopeFactors) != nullptr) {
      return metadata_.Unsupported(Key("rope.scaling.type"),
                                   absl::StrCat("stands beside a tensor ", kGgufRopeFactors));
    }
    return absl::OkStatus();
  }

  // A converter writes yarn_attn_factor of config.json's attention_factor as of its attn_factor, which mean
  // other things. 1 is nothing, and 1 / attention_factor is attn_factor as models publish it, which
  // transformers takes for nothing (decision 080); others could be either.
  absl::Status CheckYarnFactors() const {
    const double cancels = 1 / config_.rope.attention_factor;
    for (const char* name : {"rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"}) {
      ASSIGN_OR_RETURN(const double factor,
                       metadata_.NumberOr(Key(name), 1.0, -kMaxFactor, kMaxFactor));
      if (factor == 1.0 || std::abs(factor - cancels) <= 1e-4 * cancels) continue;
      return metadata_.Unsupported(
          Key(name), absl::StrCat("is neither 1 nor ", cancels, ", which change nothing here"));
    }
    const char* name = "rope.scaling.yarn_ext_factor";
    ASSIGN_OR_RETURN(const double mix, metadata_.NumberOr(Key(name), 1.0, -kMaxFactor, kMaxFactor));
    // Below 0: what the type implies, 1.
    if (mix == 1.0 || mix < 0) return absl::OkStatus();
    return metadata_.Unsupported(Key(name), "is not 1: part of an extrapolation is not run");
  }

  // What llama.cpp has in its code of Gemma 3, where the file says nothing: one layer in six sees all
  // tokens, the others turn by 10,000 without scaling, and only the model of 62 layers (27B) divides
  // scores by another root than head_dim's.
  absl::Status ParseGemma() {
    constexpr int32_t kLayersOf27B = 62;
    SlidingConfig& sliding = config_.sliding;
    ASSIGN_OR_RETURN(sliding.window,
                     metadata_.Int(Key("attention.sliding_window"), 1, kMaxPositions));
    RETURN_IF_ERROR(ParsePattern());
    ASSIGN_OR_RETURN(sliding.rope.theta,
                     metadata_.NumberOr(Key("rope.freq_base_swa"), 10000.0, 1.0, kMaxTheta));
    if (config_.rope.type != RopeType::kDefault && config_.rope.type != RopeType::kLinear) {
      return metadata_.Unsupported(Key("rope.scaling.type"),
                                   "is not run where layers differ in their rope");
    }
    const double head_dim = config_.shape.head_dim;
    config_.query_scalar = config_.shape.layers == kLayersOf27B
                               ? static_cast<double>(config_.hidden_size) / config_.shape.q_heads
                               : head_dim;
    if (metadata_.Has(Key("attention.scale"))) {
      ASSIGN_OR_RETURN(const double scale, metadata_.Number(Key("attention.scale"), 1e-3, 1e3));
      config_.query_scalar = 1 / (scale * scale);
    }
    return absl::OkStatus();
  }

  // A number, or a bool for each layer: whether it slides.
  absl::Status ParsePattern() {
    const std::string key = Key("attention.sliding_window_pattern");
    const GgufValue* value = metadata_.Find(key);
    const bool listed = value != nullptr && value->type == GgufValueType::kArray;
    int64_t every = 6;
    if (!listed) {
      ASSIGN_OR_RETURN(every, metadata_.IntOr(key, every, 1, kMaxLayers));
    } else if (value->element != GgufValueType::kBool || value->count != config_.shape.layers) {
      return metadata_.Invalid(
          key, absl::StrCat("is not one bool for each of ", config_.shape.layers, " layers"));
    }
    for (int32_t i = 0; i < config_.shape.layers; ++i) {
      const bool slides = listed ? value->bytes[static_cast<size_t>(i)] != 0 : (i + 1) % every != 0;
      if (slides) config_.sliding.layers.push_back(i);
    }
    return absl::OkStatus();
  }

  absl::Status ParseRopeFactors(const GgufTensor& tensor) {
    const auto refuse = [&](absl::string_view what) {
      return absl::UnimplementedError(
          absl::StrCat(metadata_.where(), ": tensor \"", kGgufRopeFactors, "\" ", what));
    };
    const int64_t pairs = config_.shape.head_dim / 2;
    if (tensor.type != kernels::GgufType::kF32 || tensor.shape != std::vector<int64_t>{pairs}) {
      return refuse(absl::StrCat("is not F32 [", pairs, "]"));
    }
    if (config_.rope.type != RopeType::kDefault) return refuse("stands beside a rope.scaling.type");
    std::vector<float> factors(static_cast<size_t>(pairs));
    kernels::Dequantize(tensor.type, tensor.bytes.data(), pairs, factors.data());
    RopeConfig scaled = config_.rope;
    scaled.type = RopeType::kLlama3;
    scaled.factor = *std::max_element(factors.begin(), factors.end());
    scaled.low_freq_factor = kLlama3LowFreqFactor;
    scaled.high_freq_factor = kLlama3HighFreqFactor;
    ASSIGN_OR_RETURN(scaled.original_max_position_embeddings,
                     metadata_.IntOr(Key("rope.scaling.original_context_length"),
                                     kLlama3TrainedLength, 1, kMaxPositions));
    const std::vector<float> plain = RopeInvFreq(config_.rope, config_.shape.head_dim);
    const std::vector<float> with = RopeInvFreq(scaled, config_.shape.head_dim);
    for (size_t i = 0; i < factors.size(); ++i) {
      if (!(std::abs(plain[i] / factors[i] - with[i]) <= 1e-5f * with[i])) {
        return refuse(absl::StrCat("divides frequency ", i, " by ", factors[i],
                                   ", which is not Llama 3's scaling by ", scaled.factor,
                                   " beyond ", scaled.original_max_position_embeddings, " tokens"));
      }
    }
    config_.rope = scaled;
    return absl::OkStatus();
  }

  absl::Status ParseSpecialTokens() {
    const int64_t last = config_.vocab_size - 1;
    ASSIGN_OR_RETURN(const int64_t bos,
                     metadata_.IntOr("tokenizer.ggml.bos_token_id", -1, 0, last));
    config_.bos_token_id = static_cast<TokenId>(bos);
    // The end of a text, of a turn, of a message: each ends an answer.
    for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                            "tokenizer.ggml.eom_token_id"}) {
      ASSIGN_OR_RETURN(const int64_t id, metadata_.IntOr(key, -1, 0, last));
      const TokenId token = static_cast<TokenId>(id);
      auto& ends = config_.eos_token_ids;
      if (id >= 0 && std::find(ends.begin(), ends.end(), token) == ends.end())
        ends.push_back(token);
    }
    return absl::OkStatus();
  }

  const Gguf& gguf_;
  const GgufMetadata& metadata_;
  std::string prefix_;
  ModelConfig config_;
};

}  // namespace

absl::StatusOr<ModelConfig> GgufModelConfig(const Gguf& gguf) { return Parser(gguf).Run(); }

bool GgufHasAlternatingHalves(const ModelConfig& config) {
  return config.architecture == Architecture::kLlama;
}

}  // namespace carrel::model
