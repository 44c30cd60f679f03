#include "prefill/attention_config.h"

#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "common/lab.h"
#include "common/named_settings.h"
#include "common/status.h"
#include "model/fingerprint.h"

namespace carrel::prefill {
namespace {

constexpr std::pair<absl::string_view, AttentionKind> kKinds[] = {
    {"dense", AttentionKind::kDense},
    {"hip", AttentionKind::kHip},
    {"infinitehip", AttentionKind::kInfiniteHip}};

constexpr int64_t kMostRows = int64_t{1} << 20;

// By name, what a kind of attention can be told.
std::map<absl::string_view, int64_t*> Parameters(AttentionConfig& config) {
  if (config.kind == AttentionKind::kDense) return {};
  std::map<absl::string_view, int64_t*> parameters = {{"rows", &config.rows},
                                                      {"sink", &config.sink},
                                                      {"window", &config.window},
                                                      {"block_q", &config.block_q},
                                                      {"stride_q", &config.stride_q}};
  if (config.kind == AttentionKind::kHip) parameters["block_k"] = &config.block_k;
  return parameters;
}

absl::Status CheckBounds(absl::string_view name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("attention: ", name, "=", value, " is outside [", least, ", ", most, "]"));
}

}  // namespace

absl::StatusOr<AttentionConfig> ParseAttention(absl::string_view text) {
  const NamedSettings split = SplitNamedSettings(text);
  AttentionConfig config;
  ASSIGN_OR_RETURN(config.kind, ValueNamed("attention", text, split.name, kKinds));
  const std::map<absl::string_view, int64_t*> parameters = Parameters(config);
  for (const auto& [key, value] : split.settings) {
    const auto parameter = parameters.find(key);
    if (parameter == parameters.end())
      return NoSuchParameter("attention", text, split.name, key, parameters);
    if (!absl::SimpleAtoi(value, parameter->second)) {
      return absl::InvalidArgumentError(
          absl::StrCat("attention=", text, ": ", key, "=", value, " is not a number"));
    }
  }
  return config;
}

absl::StatusOr<KeyPosition> ParseKeyPosition(absl::string_view name) {
  if (name == "rotated") return KeyPosition::kAfterRope;
  if (name == model::kKeyPositionNone) return KeyPosition::kNone;
  return absl::InvalidArgumentError(
      absl::StrCat("key_position=", name, " is none of rotated, none"));
}

absl::string_view KeyPositionName(KeyPosition position) {
  return position == KeyPosition::kNone ? model::kKeyPositionNone : model::kKeyPosition;
}

absl::Status ValidateAttention(const AttentionConfig& config, const model::ModelConfig& model) {
  const bool moved = config.rope == model::Rope::kInfiniteHip;
  if (config.kind != AttentionKind::kDense)
    RETURN_IF_ERROR(CheckLab(absl::StrCat("attention=", AttentionText(config))));
  if (moved && config.key_position != KeyPosition::kNone) {
    return absl::InvalidArgumentError(
        "rope=infinitehip needs key_position=none: its keys have no position of their own to be "
        "stored at");
  }
  if (moved && config.kind == AttentionKind::kDense) {
    return absl::InvalidArgumentError(
        "rope=infinitehip gives positions to the rows that attention chooses: it needs attention "
        "hip or infinitehip, not dense");
  }
  if (model.sliding.window > 0 &&
      (config.kind != AttentionKind::kDense || config.key_position != KeyPosition::kAfterRope)) {
    return absl::UnimplementedError(
        "layers with a sliding window are prefilled with attention=dense and key_position=rotated: "
        "other positions and choices are not run for them");
  }
  if (config.kind == AttentionKind::kDense) return absl::OkStatus();
  RETURN_IF_ERROR(CheckBounds("rows", config.rows, 16, kMostRows));
  RETURN_IF_ERROR(CheckBounds("sink", config.sink, 0, kMostRows));
  RETURN_IF_ERROR(CheckBounds("window", config.window, 0, kMostRows));
  RETURN_IF_ERROR(CheckBounds("block_k", config.block_k, 1, 64));
  if (config.block_q != 16 && config.block_q != 32 && config.block_q != 64 &&
      config.block_q != 128) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention: block_q=", config.block_q, " is none of 16, 32, 64, 128"));
  }
  RETURN_IF_ERROR(CheckBounds("stride_q", config.stride_q, 1, config.block_q));
  const int64_t attended = config.sink + config.rows + config.window + config.block_q;
  if (moved && attended > model.max_position_embeddings) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention: sink, rows, window and block_q are ", attended,
                     " positions together, more than the model's max_position_embeddings=",
                     model.max_position_embeddings));
  }
  return absl::OkStatus();
}

std::string AttentionText(const AttentionConfig& config) {
  AttentionConfig copy = config;
  std::string text;
  for (const auto& [name, kind] : kKinds) {
    if (kind == config.kind) text = std::string(name);
  }
  const char* separator = ":";
  for (const auto& [name, value] : Parameters(copy)) {
    absl::StrAppend(&text, separator, name, "=", *value);
    separator = ",";
  }
  return text;
}

}  // namespace carrel::prefill
