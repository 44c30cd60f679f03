#include "model/generation_defaults.h"

#include <algorithm>
#include <filesystem>

#include "absl/strings/strip.h"
#include "common/file.h"
#include "common/json.h"
#include "common/status.h"
#include "model/gguf.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;

constexpr double kMaxTemperature = 100, kMinTopP = 1e-6, kMinPenalty = 0.01, kMaxPenalty = 100;

// Fields that change which tokens transformers gives, and that are not done here, with the number that
// changes nothing.
struct Undone {
  const char* name;
  double neutral;
};
constexpr double kNone = -1;  // whatever is said changes something
constexpr Undone kUndone[] = {
    {"bad_words_ids", kNone},
    {"begin_suppress_tokens", kNone},
    {"epsilon_cutoff", 0},
    {"encoder_repetition_penalty", 1},
    {"eta_cutoff", 0},
    {"exponential_decay_length_penalty", kNone},
    {"forced_bos_token_id", kNone},
    {"forced_eos_token_id", kNone},
    {"guidance_scale", 1},
    {"min_length", 0},
    {"min_new_tokens", 0},
    {"no_repeat_ngram_size", 0},
    {"num_beams", 1},
    {"penalty_alpha", 0},
    {"sequence_bias", kNone},
    {"suppress_tokens", kNone},
    {"typical_p", 1},
};

// What a folder and a GGUF file both say, under names of their own.
template <typename Fields>
absl::Status ReadNumbers(const Fields& fields, absl::string_view prefix,
                         absl::string_view temperature, absl::string_view penalty,
                         GenerationDefaults& advice) {
  const auto number = [&](absl::string_view name, double min, double max,
                          std::optional<double>& value) {
    const std::string key = absl::StrCat(prefix, name);
    if (!fields.Has(key)) return absl::OkStatus();
    ASSIGN_OR_RETURN(value, fields.Number(key, min, max));
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(number(temperature, 0, kMaxTemperature, advice.temperature));
  RETURN_IF_ERROR(number("top_p", kMinTopP, 1, advice.top_p));
  RETURN_IF_ERROR(number("min_p", 0, 1, advice.min_p));
  RETURN_IF_ERROR(number(penalty, kMinPenalty, kMaxPenalty, advice.repetition_penalty));
  const std::string top_k = absl::StrCat(prefix, "top_k");
  if (!fields.Has(top_k)) return absl::OkStatus();
  ASSIGN_OR_RETURN(const int64_t tokens, fields.Int(top_k, -1, INT32_MAX));
  advice.top_k = std::max<int64_t>(tokens, 0);
  return absl::OkStatus();
}

absl::Status ReadFolder(const JsonFields& fields, GenerationDefaults& advice) {
  if (fields.Has("do_sample")) {
    ASSIGN_OR_RETURN(advice.do_sample, fields.BoolOr("do_sample", false));
  }
  RETURN_IF_ERROR(ReadNumbers(fields, "", "temperature", "repetition_penalty", advice));
  for (const auto& [name, neutral] : kUndone) {
    const json* value = fields.Find(name);
    if (value == nullptr || (value->is_structured() && value->empty())) continue;
    if (!value->is_number() || value->get<double>() != neutral) advice.ignored.emplace_back(name);
  }
  return absl::OkStatus();
}

absl::Status ReadGguf(const GgufMetadata& metadata, GenerationDefaults& advice) {
  constexpr absl::string_view kPrefix = "general.sampling.";
  RETURN_IF_ERROR(ReadNumbers(metadata, kPrefix, "temp", "penalty_repeat", advice));
  for (const auto& [key, value] : metadata.values()) {
    absl::string_view name = key;
    if (!absl::ConsumePrefix(&name, kPrefix)) continue;
    const absl::string_view known[] = {"temp", "top_p", "min_p", "penalty_repeat", "top_k"};
    if (std::find(std::begin(known), std::end(known), name) == std::end(known)) {
      advice.ignored.emplace_back(key);
    }
  }
  return absl::OkStatus();
}

bool Says(const GenerationDefaults& advice) {
  return advice.samples().has_value() || advice.repetition_penalty.has_value() ||
         !advice.ignored.empty();
}

}  // namespace

std::optional<bool> GenerationDefaults::samples() const {
  if (temperature == 0.0) return false;
  if (do_sample.has_value()) return do_sample;
  if (temperature || top_p || top_k || min_p) return true;
  return std::nullopt;
}

absl::StatusOr<GenerationDefaults> LoadGenerationDefaults(const std::string& model_dir) {
  GenerationDefaults advice;
  std::string source = model_dir;
  if (IsGgufPath(model_dir)) {
    ASSIGN_OR_RETURN(const std::shared_ptr<const Gguf> gguf, Gguf::Open(model_dir));
    RETURN_IF_ERROR(ReadGguf(gguf->metadata(), advice));
  } else {
    source = (std::filesystem::path(model_dir) / "generation_config.json").string();
    absl::StatusOr<std::string> text = ReadFile(source);
    if (absl::IsNotFound(text.status())) return advice;
    RETURN_IF_ERROR(text.status());
    ASSIGN_OR_RETURN(const json object, ParseJsonObject(*text, source));
    RETURN_IF_ERROR(ReadFolder(JsonFields(source, object), advice));
  }
  if (Says(advice)) advice.source = source;
  return advice;
}

}  // namespace carrel::model
