#include "model/rope_config.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>

#include "common/status.h"
#include "model/field_rules.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;

constexpr double kDefaultTheta = 10000.0;  // of every config class that we read
constexpr double kMinTheta = 1.0;
constexpr double kMinFreqFactor = 1e-6;

absl::StatusOr<RopeType> ParseType(const JsonFields& rope) {
  // "type" is the older name of "rope_type"; some files carry both.
  std::optional<RopeType> type;
  for (const char* field : {"rope_type", "type"}) {
    if (!rope.Has(field)) continue;
    ASSIGN_OR_RETURN(const std::string name, rope.String(field));
    RopeType parsed = RopeType::kDefault;
    if (name == "linear") {
      parsed = RopeType::kLinear;
    } else if (name == "llama3") {
      parsed = RopeType::kLlama3;
    } else if (name == "yarn") {
      parsed = RopeType::kYarn;
    } else if (name == "dynamic" || name == "longrope" || name == "su") {
      return rope.Unsupported(
          field, "is not run: it turns keys by the length of the text, and stored keys stay");
    } else if (name != "default") {
      return rope.Unsupported(field, "is not one of default, linear, llama3, yarn");
    }
    if (type && *type != parsed) return rope.Invalid("type", "contradicts rope_type");
    type = parsed;
  }
  return type.value_or(RopeType::kDefault);
}

bool Reads(RopeType type, absl::string_view name) {
  const auto one_of = [&](std::initializer_list<absl::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (type == RopeType::kLinear) return name == "factor";
  if (type == RopeType::kLlama3) return one_of({"factor", "low_freq_factor", "high_freq_factor"});
  // attn_factor is of other programs: transformers takes it for nothing (decision 080).
  return type == RopeType::kYarn &&
         one_of({"factor", "attention_factor", "attn_factor", "beta_fast", "beta_slow", "mscale",
                 "mscale_all_dim", "truncate"});
}

// Every key is either understood for this rope type or refused: an ignored one would change K.
absl::Status CheckKeys(const JsonFields& rope, RopeType type) {
  for (const auto& [name, value] : rope.object().items()) {
    if (value.is_null() || name == "rope_type" || name == "type" || name == "rope_theta") continue;
    // transformers itself records the trained length with types that do not read it.
    if (name == "original_max_position_embeddings" || Reads(type, name)) continue;
    if (name == "finetuned" && type == RopeType::kYarn) continue;  // says how weights came to be
    if (name == "partial_rotary_factor") {
      if (!value.is_number() || value.get<double>() != 1.0) {
        return rope.Unsupported(name, "is not 1: partial rotations are not run");
      }
      continue;
    }
    const RopeType others[] = {RopeType::kLinear, RopeType::kLlama3, RopeType::kYarn};
    if (!std::any_of(std::begin(others), std::end(others),
                     [&name = name](RopeType other) { return Reads(other, name); })) {
      return rope.Unsupported(name, "is not a rope parameter that is understood");
    }
    return rope.Invalid(name, absl::StrCat("is not a parameter of rope type ", RopeTypeName(type)));
  }
  return absl::OkStatus();
}

// Peng et al., "YaRN", section 3.4; mscale as DeepSeek's models write it.
double YarnScale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

absl::Status ParseYarn(const JsonFields& rope, int64_t max_position_embeddings,
                       RopeConfig& result) {
  ASSIGN_OR_RETURN(
      result.original_max_position_embeddings,
      rope.IntOr("original_max_position_embeddings", max_position_embeddings, 1, kMaxPositions));
  const double ratio = static_cast<double>(max_position_embeddings) /
                       static_cast<double>(result.original_max_position_embeddings);
  ASSIGN_OR_RETURN(result.factor, rope.NumberOr("factor", std::max(ratio, 1.0), 1.0, kMaxFactor));
  ASSIGN_OR_RETURN(result.beta_fast, rope.NumberOr("beta_fast", 32.0, kMinFreqFactor, kMaxFactor));
  ASSIGN_OR_RETURN(result.beta_slow, rope.NumberOr("beta_slow", 1.0, kMinFreqFactor, kMaxFactor));
  if (result.beta_fast < result.beta_slow) {
    return rope.Invalid("beta_fast", absl::StrCat("is below beta_slow=", result.beta_slow));
  }
  RETURN_IF_ERROR(rope.NumberOr("attn_factor", 1.0, kMinFreqFactor, kMaxFactor).status());
  ASSIGN_OR_RETURN(result.truncate, rope.BoolOr("truncate", true));
  ASSIGN_OR_RETURN(const double mscale, rope.NumberOr("mscale", 0.0, 0.0, kMaxFactor));
  ASSIGN_OR_RETURN(const double of_all, rope.NumberOr("mscale_all_dim", 0.0, 0.0, kMaxFactor));
  const double inferred = mscale != 0 && of_all != 0
                              ? YarnScale(result.factor, mscale) / YarnScale(result.factor, of_all)
                              : YarnScale(result.factor, 1.0);
  ASSIGN_OR_RETURN(result.attention_factor,
                   rope.NumberOr("attention_factor", inferred, kMinFreqFactor, kMaxFactor));
  return absl::OkStatus();
}

absl::StatusOr<RopeConfig> ParseObject(const JsonFields& rope, std::optional<double> outer_theta,
                                       int64_t max_position_embeddings) {
  RopeConfig result;
  ASSIGN_OR_RETURN(result.type, ParseType(rope));
  RETURN_IF_ERROR(CheckKeys(rope, result.type));
  ASSIGN_OR_RETURN(result.theta, rope.NumberOr("rope_theta", outer_theta.value_or(kDefaultTheta),
                                               kMinTheta, kMaxTheta));
  if (outer_theta && *outer_theta != result.theta) {
    return rope.Invalid("rope_theta", absl::StrCat("contradicts rope_theta=", *outer_theta,
                                                   " of the configuration"));
  }
  if (result.type == RopeType::kDefault) return result;
  if (result.type == RopeType::kYarn) {
    RETURN_IF_ERROR(ParseYarn(rope, max_position_embeddings, result));
    return result;
  }
  ASSIGN_OR_RETURN(result.factor, rope.Number("factor", 1.0, kMaxFactor));
  if (result.type == RopeType::kLinear) return result;

  ASSIGN_OR_RETURN(result.low_freq_factor,
                   rope.Number("low_freq_factor", kMinFreqFactor, kMaxFactor));
  ASSIGN_OR_RETURN(result.high_freq_factor,
                   rope.Number("high_freq_factor", kMinFreqFactor, kMaxFactor));
  if (result.high_freq_factor <= result.low_freq_factor) {
    return rope.Invalid("high_freq_factor",
                        absl::StrCat("is not above low_freq_factor=", result.low_freq_factor));
  }
  ASSIGN_OR_RETURN(result.original_max_position_embeddings,
                   rope.Int("original_max_position_embeddings", 1, kMaxPositions));
  return result;
}

}  // namespace

absl::StatusOr<RopeConfig> ParseRopeConfig(const JsonFields& config,
                                           int64_t max_position_embeddings) {
  if (config.Has("partial_rotary_factor")) {
    ASSIGN_OR_RETURN(const double partial, config.Number("partial_rotary_factor", 0.0, 1.0));
    if (partial != 1.0) {
      return config.Unsupported("partial_rotary_factor", "is not 1: partial rotations are not run");
    }
  }
  std::optional<double> theta;
  if (config.Has("rope_theta")) {
    ASSIGN_OR_RETURN(theta, config.Number("rope_theta", kMinTheta, kMaxTheta));
  }
  std::optional<RopeConfig> result;
  for (const char* field : {"rope_parameters", "rope_scaling"}) {
    const json* object = config.Find(field);
    if (object == nullptr) continue;
    if (!object->is_object()) return config.Invalid(field, "is not an object");
    ASSIGN_OR_RETURN(const RopeConfig parsed,
                     ParseObject(JsonFields(absl::StrCat(config.where(), ": ", field), *object),
                                 theta, max_position_embeddings));
    if (result && !(*result == parsed)) {
      return config.Invalid("rope_scaling", "contradicts rope_parameters");
    }
    result = parsed;
  }
  if (result) return *result;
  RopeConfig plain;
  plain.theta = theta.value_or(kDefaultTheta);
  return plain;
}

namespace {

constexpr double kGemmaFullTheta = 1e6, kGemmaSlidingTheta = 1e4;  // Gemma3TextConfig's

// rope_parameters of one kind of layer, with the theta that holds where it gives none.
absl::StatusOr<RopeConfig> ParseOfLayers(const JsonFields& parameters, const char* kind,
                                         double theta, int64_t max_position_embeddings) {
  RopeConfig plain;
  plain.theta = theta;
  const json* object = parameters.Find(kind);
  if (object == nullptr) return plain;
  if (!object->is_object()) return parameters.Invalid(kind, "is not an object");
  json with_theta = *object;
  if (with_theta.count("rope_theta") == 0) with_theta["rope_theta"] = theta;
  return ParseObject(JsonFields(absl::StrCat(parameters.where(), ": ", kind), with_theta),
                     std::nullopt, max_position_embeddings);
}

absl::Status RefuseOtherScaling(const JsonFields& config, const RopeConfig& rope) {
  if (rope.type == RopeType::kDefault || rope.type == RopeType::kLinear) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(config.where(), ": rope type ",
                                               RopeTypeName(rope.type),
                                               " is not run where layers differ in their rope"));
}

}  // namespace

absl::StatusOr<LayeredRope> ParseLayeredRope(const JsonFields& config,
                                             int64_t max_position_embeddings) {
  ASSIGN_OR_RETURN(const double full,
                   config.NumberOr("rope_theta", kGemmaFullTheta, kMinTheta, kMaxTheta));
  ASSIGN_OR_RETURN(const double sliding, config.NumberOr("rope_local_base_freq", kGemmaSlidingTheta,
                                                         kMinTheta, kMaxTheta));
  LayeredRope rope;
  rope.sliding.theta = sliding;
  if (const json* parameters = config.Find("rope_parameters")) {
    if (!parameters->is_object()) return config.Invalid("rope_parameters", "is not an object");
    for (const char* field : {"rope_scaling", "rope_theta", "rope_local_base_freq"}) {
      if (config.Has(field)) return config.Invalid(field, "stands beside rope_parameters");
    }
    const JsonFields fields(absl::StrCat(config.where(), ": rope_parameters"), *parameters);
    constexpr absl::string_view kKinds[] = {"full_attention", "sliding_attention"};
    RETURN_IF_ERROR(RefuseUnknownFields(fields, kKinds));
    ASSIGN_OR_RETURN(rope.full,
                     ParseOfLayers(fields, "full_attention", full, max_position_embeddings));
    ASSIGN_OR_RETURN(rope.sliding,
                     ParseOfLayers(fields, "sliding_attention", sliding, max_position_embeddings));
  } else if (const json* scaling = config.Find("rope_scaling")) {
    if (!scaling->is_object()) return config.Invalid("rope_scaling", "is not an object");
    ASSIGN_OR_RETURN(
        rope.full, ParseObject(JsonFields(absl::StrCat(config.where(), ": rope_scaling"), *scaling),
                               full, max_position_embeddings));
  } else {
    rope.full.theta = full;
  }
  RETURN_IF_ERROR(RefuseOtherScaling(config, rope.full));
  RETURN_IF_ERROR(RefuseOtherScaling(config, rope.sliding));
  return rope;
}

namespace {

// Dimensions that turn more than beta_fast times over the original length keep their frequency,
// those that turn less than beta_slow times have it divided by factor, and those between are
// interpolated by dimension.
void ScaleByYarn(const RopeConfig& rope, int32_t head_dim, std::vector<float>& inv_freq) {
  const double dim = head_dim;
  const auto dimension = [&](double turns) {
    const double length = static_cast<double>(rope.original_max_position_embeddings);
    return dim * std::log(length / (turns * 2 * M_PI)) / (2 * std::log(rope.theta));
  };
  double low = dimension(rope.beta_fast), high = dimension(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const float ramp = std::clamp(
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f,
        1.0f);
    const float stays = 1.0f - ramp;
    const float divided = inv_freq[i] / static_cast<float>(rope.factor);
    inv_freq[i] = divided * (1.0f - stays) + inv_freq[i] * stays;
  }
}

}  // namespace

// Every step rounds to float where the tensors of transformers do; a division of a number by a
// tensor is there a reciprocal and a product.
std::vector<float> RopeInvFreq(const RopeConfig& rope, int32_t head_dim) {
  std::vector<float> inv_freq(static_cast<size_t>(head_dim) / 2);
  const float theta = static_cast<float>(rope.theta);
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_dim);
    inv_freq[i] = 1.0f / static_cast<float>(std::pow(double{theta}, double{exponent}));
  }
  const float factor = static_cast<float>(rope.factor);
  if (rope.type == RopeType::kLinear) {
    for (float& f : inv_freq) f /= factor;
  }
  if (rope.type == RopeType::kYarn) ScaleByYarn(rope, head_dim, inv_freq);
  if (rope.type != RopeType::kLlama3) return inv_freq;

  // Wavelengths beyond the trained length are stretched by factor, short ones stay, and those
  // between are interpolated (Llama 3.1).
  const float trained = static_cast<float>(rope.original_max_position_embeddings);
  const double length = static_cast<double>(rope.original_max_position_embeddings);
  const float low_wavelength = static_cast<float>(length / rope.low_freq_factor);
  const float high_wavelength = static_cast<float>(length / rope.high_freq_factor);
  const float low = static_cast<float>(rope.low_freq_factor);
  const float span = static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
  for (float& f : inv_freq) {
    const float wavelength = (1.0f / f) * static_cast<float>(2 * M_PI);
    if (wavelength > low_wavelength) {
      f /= factor;
    } else if (wavelength >= high_wavelength) {
      const float smooth = ((1.0f / wavelength) * trained - low) / span;
      f = (1.0f - smooth) * f / factor + smooth * f;
    }
  }
  return inv_freq;
}

}  // namespace carrel::model
