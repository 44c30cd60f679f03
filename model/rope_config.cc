#include "model/rope_config.h"

#include <cmath>
#include <optional>
#include <utility>

#include "common/status.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;

constexpr double kDefaultTheta = 10000.0;  // of every config class that we read
constexpr double kMinTheta = 1.0;
constexpr double kMaxTheta = 1e30;  // well inside float
constexpr double kMaxFactor = 1e6;
constexpr double kMinFreqFactor = 1e-6;
constexpr int64_t kMaxPositions = int64_t{1} << 30;

bool SameRope(const RopeConfig& a, const RopeConfig& b) {
  return a.type == b.type && a.theta == b.theta && a.factor == b.factor &&
         a.low_freq_factor == b.low_freq_factor && a.high_freq_factor == b.high_freq_factor &&
         a.original_max_position_embeddings == b.original_max_position_embeddings;
}

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
    } else if (name != "default") {
      return rope.Unsupported(field, "is not one of default, linear, llama3");
    }
    if (type && *type != parsed) return rope.Invalid("type", "contradicts rope_type");
    type = parsed;
  }
  return type.value_or(RopeType::kDefault);
}

// Every key is either understood for this rope type or refused: an ignored one would change K.
absl::Status CheckKeys(const JsonFields& rope, RopeType type) {
  for (const auto& [name, value] : rope.object().items()) {
    if (value.is_null() || name == "rope_type" || name == "type" || name == "rope_theta") continue;
    if (name == "partial_rotary_factor") {
      if (!value.is_number() || value.get<double>() != 1.0) {
        return rope.Unsupported(name, "is not 1: partial rotations are not run");
      }
      continue;
    }
    const bool known = name == "factor" || name == "low_freq_factor" ||
                       name == "high_freq_factor" || name == "original_max_position_embeddings";
    if (!known) return rope.Unsupported(name, "is not a rope parameter that is understood");
    const bool used = type == RopeType::kLlama3 || (type == RopeType::kLinear && name == "factor");
    // transformers itself records the trained length with types that do not read it.
    if (!used && name != "original_max_position_embeddings") {
      return rope.Invalid(name, type == RopeType::kLinear
                                    ? "is not a parameter of rope type linear"
                                    : "is not a parameter of rope type default");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<RopeConfig> ParseObject(const JsonFields& rope, std::optional<double> outer_theta) {
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

absl::StatusOr<RopeConfig> ParseRopeConfig(const JsonFields& config) {
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
    ASSIGN_OR_RETURN(
        const RopeConfig parsed,
        ParseObject(JsonFields(absl::StrCat(config.where(), ": ", field), *object), theta));
    if (result && !SameRope(*result, parsed)) {
      return config.Invalid("rope_scaling", "contradicts rope_parameters");
    }
    result = parsed;
  }
  if (result) return *result;
  RopeConfig plain;
  plain.theta = theta.value_or(kDefaultTheta);
  return plain;
}

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
