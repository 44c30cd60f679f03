#include "decoder/config.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "common/status.h"

namespace carrel::decoder {
namespace {

absl::Status OutOfRange(absl::string_view field, double value, absl::string_view bounds) {
  return absl::InvalidArgumentError(absl::StrCat(field, "=", value, " is outside ", bounds));
}

absl::Status UnknownName(absl::string_view field, absl::string_view name, absl::string_view known) {
  return absl::InvalidArgumentError(absl::StrCat(field, "=", name, " is none of ", known));
}

// What a store offers and rows in this host's memory do not.
absl::Status ValidateHostZone(const RetrievalConfig& config) {
  if (config.prefetch != Prefetch::kOff)
    return absl::InvalidArgumentError(
        "zone=host: there is nothing to prefetch; prefetch must be off");
  if (config.select != Select::kTopK)
    return absl::InvalidArgumentError("zone=host selects by top-k only");
  if (config.estimate == Estimate::kOn)
    return absl::InvalidArgumentError(
        "zone=host has no estimation term: the store estimates; estimate must be off");
  if (config.want != Want::kAttend)
    return absl::InvalidArgumentError("zone=host: nothing travels, so want must be attend");
  if (config.effort != 0)
    return absl::InvalidArgumentError("zone=host searches no index, so effort must be 0");
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateDeviceConfig(const DeviceConfig& device, const RetrievalConfig& config) {
  if (config.refine.has_value() && device.device != model::Device::kCpu)
    return absl::InvalidArgumentError("zone=host needs device=cpu: its methods run on the CPU");
  if (device.gpu_memory < 0)
    return absl::InvalidArgumentError(
        absl::StrCat("gpu_memory=", device.gpu_memory, " is negative"));
  if (device.new_tokens < 1 || device.new_tokens > 1 << 20) {
    return absl::InvalidArgumentError(
        absl::StrCat("new_tokens=", device.new_tokens, " is outside [1, ", 1 << 20, "]"));
  }
  if (!device.zone_on_device) return absl::OkStatus();
  if (device.device != model::Device::kCuda)
    return absl::InvalidArgumentError("zone=device needs device=cuda");
  if (config.prefetch != Prefetch::kOff)
    return absl::InvalidArgumentError(
        "zone=device: there is nothing to prefetch; prefetch must be off");
  if (config.select != Select::kTopK)
    return absl::InvalidArgumentError("zone=device selects by top-k only");
  if (config.estimate == Estimate::kOn || config.measure)
    return absl::InvalidArgumentError("zone=device neither estimates nor measures: the store does");
  return absl::OkStatus();
}

absl::Status ValidateRetrievalConfig(const RetrievalConfig& config, int32_t layers) {
  if (config.top_k != kAllRows && config.top_k < 1) {
    return OutOfRange("top_k", static_cast<double>(config.top_k),
                      "[1, tokens of the context] and not \"all\"");
  }
  if (config.dense_layers < 0 || config.dense_layers > layers) {
    return OutOfRange("dense_layers", config.dense_layers, absl::StrCat("[0, ", layers, "]"));
  }
  if (config.sink < 0) return OutOfRange("sink", static_cast<double>(config.sink), "[0, infinity)");
  if (config.local < 0)
    return OutOfRange("local", static_cast<double>(config.local), "[0, infinity)");
  if (!(config.oversample >= 1 && config.oversample <= 16))
    return OutOfRange("oversample", config.oversample, "[1, 16]");
  if (!(config.verified_hit_rate >= 0 && config.verified_hit_rate <= 1)) {
    return OutOfRange("verified_hit_rate", config.verified_hit_rate, "[0, 1]");
  }
  if (config.select == Select::kRange && !(config.range > 0 && std::isfinite(config.range))) {
    return OutOfRange("range", config.range, "(0, infinity)");
  }
  if (config.select == Select::kMass && !(config.mass > 0 && config.mass <= 1))
    return OutOfRange("mass", config.mass, "(0, 1]");
  if (config.max_rows < 0)
    return OutOfRange("max_rows", static_cast<double>(config.max_rows), "[0, infinity)");
  if (config.max_rows > 0 && config.select == Select::kTopK) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_rows=", config.max_rows, " bounds range and mass; top-k is its own bound"));
  }
  if (config.select != Select::kTopK && config.prefetch != Prefetch::kOff) {
    return absl::InvalidArgumentError(
        "prefetch asks ahead for a multiple of top_k: range and mass need prefetch=off");
  }
  if (config.select != Select::kTopK && config.budget != Budget::kUniform) {
    return absl::InvalidArgumentError(
        "budget=linear shares out a top_k: range and mass need budget=uniform");
  }
  if (config.estimate == Estimate::kOn && config.want != Want::kAttend) {
    return absl::InvalidArgumentError(
        "estimate is part of partial attention: it needs want=attend");
  }
  if (config.refine.has_value()) RETURN_IF_ERROR(ValidateHostZone(config));
  if (config.effort < 0 || config.effort > 65536)
    return OutOfRange("effort", config.effort, "[0, 65536]");
  return absl::OkStatus();
}

std::vector<int64_t> LayerBudgets(const RetrievalConfig& config, int32_t layers,
                                  int64_t zone_rows) {
  std::vector<int64_t> budgets(layers, kAllRows);
  if (config.select != Select::kTopK) {
    std::fill(budgets.begin() + config.dense_layers, budgets.end(), kAsSelected);
    return budgets;
  }
  if (config.top_k == kAllRows) return budgets;
  const int32_t sparse = layers - config.dense_layers;
  for (int32_t i = 0; i < sparse; ++i) {
    double share = 1;
    if (config.budget == Budget::kLinear && sparse > 1)
      share = 0.5 + static_cast<double>(i) / (sparse - 1);
    const int64_t rows =
        std::max<int64_t>(1, std::llround(share * static_cast<double>(config.top_k)));
    budgets[config.dense_layers + i] = rows >= zone_rows ? kAllRows : rows;
  }
  return budgets;
}

absl::StatusOr<Prefetch> ParsePrefetch(absl::string_view name) {
  if (name == "off") return Prefetch::kOff;
  if (name == "speculative") return Prefetch::kSpeculative;
  if (name == "verified") return Prefetch::kVerified;
  return UnknownName("prefetch", name, "off, speculative, verified");
}

absl::StatusOr<Want> ParseWant(absl::string_view name) {
  if (name == "rows") return Want::kRows;
  if (name == "values") return Want::kValues;
  if (name == "attend") return Want::kAttend;
  return UnknownName("want", name, "rows, values, attend");
}

absl::StatusOr<Estimate> ParseEstimate(absl::string_view name) {
  if (name == "auto") return Estimate::kAuto;
  if (name == "on") return Estimate::kOn;
  if (name == "off") return Estimate::kOff;
  return UnknownName("estimate", name, "auto, on, off");
}

absl::StatusOr<Budget> ParseBudget(absl::string_view name) {
  if (name == "uniform") return Budget::kUniform;
  if (name == "linear") return Budget::kLinear;
  return UnknownName("budget", name, "uniform, linear");
}

absl::StatusOr<int64_t> ParseTopK(absl::string_view text) {
  if (text == "all") return kAllRows;
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value)) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k=", text, " is neither a number nor \"all\""));
  }
  if (value < 1)
    return OutOfRange("top_k", static_cast<double>(value),
                      "[1, tokens of the context] and not \"all\"");
  return value;
}

absl::Status ParseSelect(absl::string_view text, RetrievalConfig& config) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits(':', 1));
  double value = 0;
  if (parts.first == "top-k") {
    config.select = Select::kTopK;
    ASSIGN_OR_RETURN(config.top_k, ParseTopK(parts.second));
    return absl::OkStatus();
  }
  if (!absl::SimpleAtod(parts.second, &value) ||
      (parts.first != "range" && parts.first != "mass")) {
    return UnknownName("select", text, "top-k:K, range:B, mass:P with numbers K, B, P");
  }
  config.select = parts.first == "range" ? Select::kRange : Select::kMass;
  (parts.first == "range" ? config.range : config.mass) = value;
  return absl::OkStatus();
}

}  // namespace carrel::decoder
