#include "model/field_rules.h"

#include <algorithm>
#include <cmath>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;

// Fields that config.cc or rope_config.cc read, and those that change no K, V or logits: training
// (dropouts, initialisation), how a program runs it (caches, dtypes, attention kernels), sampling,
// and what old versions of transformers wrote into every file.
constexpr absl::string_view kKnownFields =
    "_attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled "
    "_name_or_path architectures attention_bias attention_dropout "
    "attention_probs_dropout_prob attn_implementation bad_words_ids begin_suppress_tokens "
    "bos_token_id chunk_size_feed_forward classifier_dropout cls_token_id "
    "decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop "
    "encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty "
    "finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing head_dim "
    "hidden_act hidden_dropout hidden_dropout_prob hidden_size id2label initializer_range "
    "intermediate_size is_causal is_decoder is_llama_config keys_to_ignore_at_inference "
    "label2id layer_types length_penalty max_length max_position_embeddings "
    "max_sequence_length max_window_layers min_length mlp_bias model_max_length model_type "
    "no_repeat_ngram_size num_attention_heads num_beam_groups num_beams num_hidden_layers "
    "num_key_value_heads num_labels num_return_sequences output_attentions "
    "output_hidden_states output_scores pad_token_id partial_rotary_factor prefix "
    "pretraining_tp problem_type remove_invalid_values repetition_penalty resid_pdrop "
    "return_dict return_dict_in_generate rms_norm_eps rope_parameters rope_scaling rope_theta "
    "sep_token_id sliding_window suppress_tokens task_specific_params temperature "
    "tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript "
    "transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed "
    "unsloth_version use_bfloat16 use_cache use_sliding_window vocab_size";

// What config.json says about experts; it may be read only where the architecture has them.
constexpr absl::string_view kExpertFields =
    "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts "
    "num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef";

// And about Gemma's layers. Pictures are no part of gemma3_text; what caps scores or logits, or looks
// ahead, is read by nobody and refused if it is set.
constexpr absl::string_view kGemmaFields =
    "_sliding_window_pattern cache_implementation hidden_activation query_pre_attn_scalar "
    "rope_local_base_freq sliding_window_pattern";

template <typename Words>
bool HasAny(absl::string_view name, const Words& words) {
  return std::any_of(std::begin(words), std::end(words),
                     [&](const char* word) { return absl::StrContains(name, word); });
}

// Of these, 0 is no "none": it would be a product with nothing, a bound of nothing, a base, or the
// angle of no rotation.
bool IsZeroSomething(absl::string_view name) {
  constexpr const char* kWords[] = {"alpha",  "base",   "cap",   "clamp", "clip",  "eps",
                                    "factor", "freq",   "limit", "mult",  "ratio", "pct",
                                    "rope",   "rotary", "scal",  "slope", "temp",  "theta"};
  return HasAny(name, kWords);
}

// Of these, 1 multiplies by nothing. attention_multiplier, softmax_scale and the like are the scale of
// scores itself, and what names a depth is a part of a formula.
bool IsMultiplier(absl::string_view name) {
  constexpr const char* kOfScores[] = {"attention", "attn", "softmax", "query", "depth"};
  if (HasAny(name, kOfScores)) return false;
  constexpr const char* kSuffixes[] = {"_multiplier",     "_multipliers",  "_scale",    "_scaling",
                                       "_scaling_factor", "_scale_factor", "rotary_pct"};
  return name == "scale_emb" || std::any_of(std::begin(kSuffixes), std::end(kSuffixes),
                                            [&](const char* s) { return absl::EndsWith(name, s); });
}

// What acts while a model is trained, and what its tokens are called.
bool IsOfTrainingOrTokens(absl::string_view name, const FieldValue& value) {
  constexpr const char* kTraining[] = {"dropout",      "_pdrop",   "loss",
                                       "initializer_", "init_std", "jitter"};
  constexpr const char* kIds[] = {"_token_id", "_token_ids", "_token_index"};
  const bool is_number = std::holds_alternative<double>(value);
  if (is_number && HasAny(name, kTraining)) return true;
  // A number of a "..._token" is how many a token has.
  if (std::holds_alternative<std::string>(value)) return absl::EndsWith(name, "_token");
  return (is_number || std::holds_alternative<std::vector<double>>(value)) &&
         std::any_of(std::begin(kIds), std::end(kIds),
                     [&](const char* s) { return absl::EndsWith(name, s); });
}

bool Agrees(const Fact& fact, const FieldValue& value) {
  if (const bool* flag = std::get_if<bool>(&fact.value)) {
    const bool* said = std::get_if<bool>(&value);
    return said != nullptr && *said == *flag;
  }
  if (const double* number = std::get_if<double>(&fact.value)) {
    const double* said = std::get_if<double>(&value);
    return said != nullptr && std::abs(*said - *number) <= 1e-6 * std::abs(*number);
  }
  const std::string* said = std::get_if<std::string>(&value);
  return said != nullptr && *said == std::get<absl::string_view>(fact.value);
}

bool AllOne(const std::vector<double>& list) {
  return std::all_of(list.begin(), list.end(), [](double x) { return x == 1; });
}

}  // namespace

FieldValue ToFieldValue(const json& value) {
  if (value.is_null() || value == "" || (value.is_structured() && value.empty())) return {};
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return Something();
  std::vector<double> list;
  for (const json& one : value) {
    if (!one.is_number()) return Something();
    list.push_back(one.get<double>());
  }
  return list;
}

std::vector<Fact> FactsOf(const ModelConfig& config) {
  const double head_dim = config.shape.head_dim;
  const double scalar = config.query_scalar == 0 ? head_dim : config.query_scalar;
  std::vector<Fact> facts = {{"position_embedding_type", absl::string_view("rope")},
                             {"query_pre_attn_scalar", scalar}};
  for (const char* name : {"causal", "use_causal_mask", "use_rope", "apply_rope", "use_rotary",
                           "use_rotary_embeddings", "rms_norm", "use_rms_norm", "use_rmsnorm",
                           "gated_mlp", "use_gated_mlp", "scale_attn_weights"}) {
    facts.push_back({name, true});
  }
  for (const char* name : {"qk_norm", "use_qk_norm", "qk_layernorm", "use_qk_layernorm"}) {
    facts.push_back({name, config.qk_norm, true});
  }
  for (const char* name : {"qkv_bias", "use_qkv_bias"}) {
    facts.push_back({name, config.qkv_bias, true});
  }
  for (const char* name :
       {"attention_multiplier", "attention_scale", "attn_scale", "softmax_scale"}) {
    facts.push_back({name, 1 / std::sqrt(scalar)});
  }
  for (const char* name : {"kv_channels", "attention_head_size", "rotary_dim", "rotary_emb_dim",
                           "qk_head_dim", "v_head_dim"}) {
    facts.push_back({name, head_dim});
  }
  return facts;
}

bool IsKnownField(Architecture architecture, absl::string_view name) {
  using Words = absl::flat_hash_set<absl::string_view>;
  static const auto* const kAll = new Words(absl::StrSplit(kKnownFields, ' '));
  static const auto* const kOfExperts = new Words(absl::StrSplit(kExpertFields, ' '));
  static const auto* const kOfGemma = new Words(absl::StrSplit(kGemmaFields, ' '));
  return kAll->contains(name) ||
         (architecture == Architecture::kQwen3Moe && kOfExperts->contains(name)) ||
         (architecture == Architecture::kGemma3 && kOfGemma->contains(name));
}

bool ChangesNothing(absl::string_view name, const FieldValue& value, absl::Span<const Fact> facts) {
  if (std::holds_alternative<std::monostate>(value)) return true;
  for (const Fact& fact : facts) {
    if (fact.name != name) continue;
    if (Agrees(fact, value)) return true;
    const bool* flag = std::get_if<bool>(&value);
    const bool is_nothing = flag != nullptr && !*flag && !std::holds_alternative<bool>(fact.value);
    if (!fact.shown && !is_nothing) return false;
  }
  if (const bool* flag = std::get_if<bool>(&value)) return !*flag;
  if (IsOfTrainingOrTokens(name, value)) return true;
  if (const double* number = std::get_if<double>(&value)) {
    return (*number == 0 && !IsZeroSomething(name)) || (*number == 1 && IsMultiplier(name));
  }
  const auto* list = std::get_if<std::vector<double>>(&value);
  return list != nullptr && AllOne(*list) && IsMultiplier(name);
}

}  // namespace carrel::model
