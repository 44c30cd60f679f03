#include "decoder/config.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "common/status.h"
#include "decoder/lab_options.h"
#include "decoder/select/method_type.h"

namespace carrel::decoder {
namespace {

absl::Status OutOfRange(absl::string_view field, double value, absl::string_view bounds) {
  return absl::InvalidArgumentError(absl::StrCat(field, "=", value, " is outside ", bounds));
}

absl::Status UnknownName(absl::string_view field, absl::string_view name, absl::string_view known) {
  return absl::InvalidArgumentError(absl::StrCat(field, "=", name, " is none of ", known));
}

// By range or mass: how many rows is not known before.
bool BoundedByScore(const RetrievalConfig& config) {
  const auto* const selection = std::get_if<select::Selection>(&config.selection);
  return selection != nullptr && !select::IsAll(*selection) && select::TopKRows(*selection) == 0;
}

// What a store offers and a zone that the decoder holds does not.
absl::Status ValidateHeldZone(const RetrievalConfig& config) {
  const auto refused = [](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("zone=host and zone=device ", why));
  };
  if (BoundedByScore(config)) return refused("select by fidelity or top-k only");
  if (config.effort != 0) return refused("search no index, so effort must be 0");
  return absl::OkStatus();
}

// A zone in this host's memory that a GPU attends to.
absl::Status ValidateGpuHostZone(const HostZoneOptions& zone, const RetrievalConfig& config) {
  const BankConfig& bank = zone.bank;
  RETURN_IF_ERROR(MethodOf(zone.selector).ValidateCuda(zone.selector));
  if (config.prefetch != Prefetch::kOff && !MethodOf(zone.selector).forks())
    return absl::InvalidArgumentError(
        "zone=host with device=cuda: only method=hash chooses two layers' rows at once; prefetch "
        "must be off");
  if (bank.bytes < 0)
    return absl::InvalidArgumentError(absl::StrCat("bank_bytes=", bank.bytes, " is negative"));
  if (config.prefetch == Prefetch::kSpeculative && bank.bytes == 0)
    return absl::InvalidArgumentError(
        "zone=host with device=cuda: rows are fetched ahead into banks: prefetch=speculative needs "
        "bank_bytes > 0");
  if (!(bank.ahead >= 1 && bank.ahead <= 8)) return OutOfRange("bank_ahead", bank.ahead, "[1, 8]");
  if (bank.ahead != 1 && config.prefetch == Prefetch::kOff)
    return absl::InvalidArgumentError(absl::StrCat(
        "bank_ahead=", bank.ahead, " is a multiple of what is prefetched, and prefetch is off"));
  if (bank.map != kernels::RowMap::kVector && bank.bytes == 0)
    return absl::InvalidArgumentError("bank_map needs bank_bytes > 0: there are no banks");
  return absl::OkStatus();
}

struct PlainZone {
  absl::string_view name;
  bool on_gpu;
};
constexpr PlainZone kPlainZones[] = {
// by their ZoneKind
#define CARREL_ZONE(Name, name) {#name, false},
#define CARREL_GPU_ZONE(Name, name) {#name, true},
#include "decoder/zone/zones.def"
#undef CARREL_ZONE
#undef CARREL_GPU_ZONE
};

absl::Status ValidateGpuPlainZone(const PlainZoneOptions& options) {
  const PlainZone& zone = kPlainZones[static_cast<size_t>(options.kind)];
  if (zone.on_gpu) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("zone=", zone.name, " has no CUDA form: it needs device=cpu"));
}

}  // namespace

absl::Status ValidateDeviceConfig(const DeviceConfig& device, const RetrievalConfig& config) {
  const bool cuda = device.device == model::Device::kCuda;
  const auto* const host = std::get_if<HostZoneOptions>(&config.zone);
  const auto* const on_device = std::get_if<DeviceZoneOptions>(&config.zone);
  if (SelectorOf(config) != nullptr && !(host != nullptr && cuda) &&
      config.prefetch != Prefetch::kOff)
    return absl::InvalidArgumentError(
        "zone=host on the CPU and zone=device have nothing to prefetch; prefetch must be off");
  RETURN_IF_ERROR(ValidateLabDevice(device, config));
  if (config.prompt_rows == PromptRows::kAll &&
      (config.rope != Rope::kTrained || SelectorOf(config) == nullptr ||
       (host != nullptr && cuda))) {
    return absl::InvalidArgumentError(
        "prompt_rows=all reads a zone's rows in one pass where they lie: it needs zone=host on the "
        "CPU or "
        "zone=device, and rope=trained");
  }
  if (device.gpu_memory < 0)
    return absl::InvalidArgumentError(
        absl::StrCat("gpu_memory=", device.gpu_memory, " is negative"));
  if (device.new_tokens < 1 || device.new_tokens > 1 << 20) {
    return absl::InvalidArgumentError(
        absl::StrCat("new_tokens=", device.new_tokens, " is outside [1, ", 1 << 20, "]"));
  }
  if (host != nullptr && cuda) return ValidateGpuHostZone(*host, config);
  if (host != nullptr) return ValidateNoBanks(host->bank);
  if (const auto* const plain = std::get_if<PlainZoneOptions>(&config.zone))
    return cuda ? ValidateGpuPlainZone(*plain) : absl::OkStatus();
  if (!cuda) return absl::InvalidArgumentError("zone=device needs device=cuda");
  if (config.measure)
    return absl::InvalidArgumentError("zone=device does not measure; zone=host and the store do");
  return MethodOf(on_device->selector).ValidateCuda(on_device->selector);
}

const SelectorConfig* SelectorOf(const RetrievalConfig& config) {
  if (const auto* host = std::get_if<HostZoneOptions>(&config.zone)) return &host->selector;
  if (const auto* device = std::get_if<DeviceZoneOptions>(&config.zone)) return &device->selector;
  return nullptr;
}

absl::Status ValidateNoBanks(const BankConfig& bank) {
  if (bank.bytes == 0 && bank.ahead == 1 && bank.map == kernels::RowMap::kVector)
    return absl::OkStatus();
  return absl::InvalidArgumentError(
      "banks hold rows of a zone in host memory on a GPU: they need zone=host and device=cuda");
}

int64_t MostGivenUp(const RetrievalConfig& config, const DeviceConfig& device,
                    int64_t context_tokens) {
  if (device.device != model::Device::kCpu && config.rope == Rope::kInfiniteHip) return 0;
  return std::min({kMostGivenUp, config.local, context_tokens});
}

bool ScansHere(const RetrievalConfig& config, const DeviceConfig& device) {
  const auto* const host = std::get_if<HostZoneOptions>(&config.zone);
  return host != nullptr && device.device == model::Device::kCpu &&
         host->selector.kind == SelectorKind::kExact && config.rope == Rope::kTrained;
}

bool NeedsHostRows(const RetrievalConfig& config, const DeviceConfig& device) {
  const SelectorConfig* const selector = SelectorOf(config);
  if (selector == nullptr || ScansHere(config, device)) return false;
  return (std::holds_alternative<HostZoneOptions>(config.zone) &&
          device.device == model::Device::kCpu) ||
         config.rope != Rope::kTrained || MethodOf(*selector).needs_host_rows(*selector);
}

bool TakesHostRows(const RetrievalConfig& config, const DeviceConfig& device) {
  if (ScansHere(config, device)) return false;
  return NeedsHostRows(config, device) || std::holds_alternative<HostZoneOptions>(config.zone) ||
         (std::holds_alternative<DeviceZoneOptions>(config.zone) &&
          config.estimate != Estimate::kOff);
}

absl::Status ValidateRetrievalConfig(const RetrievalConfig& config, int32_t layers) {
  if (const auto* const selection = std::get_if<select::Selection>(&config.selection)) {
    RETURN_IF_ERROR(select::ValidateSelection(*selection, {}));
  } else if (const double error = std::get<FidelityOptions>(config.selection).target_error;
             !(error > 0 && std::isfinite(error))) {
    return OutOfRange("target_error", error, "(0, infinity)");
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
  if (BoundedByScore(config) && config.prefetch != Prefetch::kOff) {
    return absl::InvalidArgumentError(
        "prefetch asks ahead for a multiple of top_k: range and mass need prefetch=off");
  }
  if (SelectorOf(config) != nullptr) RETURN_IF_ERROR(ValidateHeldZone(config));
  RETURN_IF_ERROR(ValidateLabOptions(config));
  if (config.effort < 0 || config.effort > 65536)
    return OutOfRange("effort", config.effort, "[0, 65536]");
  return absl::OkStatus();
}

std::vector<select::Selection> LayerSelections(const RetrievalConfig& config, int32_t layers,
                                               int64_t zone_rows) {
  std::vector<select::Selection> selections(static_cast<size_t>(layers), select::All());
  const auto& selection = std::get<select::Selection>(config.selection);
  const auto first_sparse = selections.begin() + config.dense_layers;
  const int64_t top_k = select::TopKRows(selection);
  if (top_k == 0) {
    std::fill(first_sparse, selections.end(), selection);
    return selections;
  }
  const int32_t sparse = layers - config.dense_layers;
  std::vector<double> shares(static_cast<size_t>(sparse), 1.0);
  if (config.budget != Budget::kUniform) shares = LabLayerShares(config, sparse);
  for (int32_t i = 0; i < sparse; ++i) {
    const int64_t rows = std::max<int64_t>(
        1, std::llround(shares[static_cast<size_t>(i)] * static_cast<double>(top_k)));
    if (rows < zone_rows) first_sparse[i] = select::TopK{rows};
  }
  return selections;
}

std::vector<select::Selection> LayerSelections(const RetrievalConfig& config,
                                               absl::Span<const int64_t> head_rows,
                                               const AttentionShape& shape, int64_t zone_rows) {
  std::vector<select::Selection> selections(static_cast<size_t>(shape.layers), select::All());
  const auto heads = static_cast<size_t>(shape.kv_heads);
  for (auto l = static_cast<size_t>(config.dense_layers); l < selections.size(); ++l) {
    const absl::Span<const int64_t> of_head = head_rows.subspan(l * heads, heads);
    const int64_t most = *std::max_element(of_head.begin(), of_head.end());
    if (most < zone_rows) selections[l] = select::TopK{most, {of_head.begin(), of_head.end()}};
  }
  return selections;
}

std::vector<int64_t> Budgets(const std::vector<select::Selection>& selections) {
  std::vector<int64_t> budgets;
  for (const select::Selection& selection : selections)
    budgets.push_back(select::IsAll(selection) ? kAllRows : select::TopKRows(selection));
  return budgets;
}

std::vector<int64_t> HeadBudgets(const std::vector<select::Selection>& selections,
                                 int32_t kv_heads) {
  const auto heads = static_cast<size_t>(kv_heads);
  std::vector<int64_t> budgets;
  for (size_t l = 0; l < selections.size(); ++l) {
    const auto* const top_k = std::get_if<select::TopK>(&selections[l]);
    if (top_k == nullptr || top_k->of_head.empty()) continue;
    budgets.resize(selections.size() * heads);
    std::copy(top_k->of_head.begin(), top_k->of_head.end(),
              budgets.begin() + static_cast<int64_t>(l * heads));
  }
  return budgets;
}

bool Estimates(const RetrievalConfig& config, bool has_summaries) {
  const SelectorConfig* const selector = SelectorOf(config);
  if (selector != nullptr && selector->mask == SelectorMask::kQHead) return false;
  return config.estimate == Estimate::kOn ||
         (config.estimate == Estimate::kAuto && config.want == Want::kAttend && has_summaries);
}

bool PromptTakesAll(const RetrievalConfig& config, const DeviceConfig& device) {
  if (config.prompt_rows != PromptRows::kAuto) return config.prompt_rows == PromptRows::kAll;
  return device.device == model::Device::kCuda && config.rope == Rope::kTrained &&
         std::holds_alternative<DeviceZoneOptions>(config.zone);
}

absl::StatusOr<kernels::RowMap> ParseRowMap(absl::string_view name) {
  if (name == "vector") return kernels::RowMap::kVector;
  if (name == "hash") return kernels::RowMap::kHash;
  return UnknownName("bank_map", name, "vector, hash");
}

absl::StatusOr<ZoneOptions> ParseZone(absl::string_view name) {
  std::string known;
  for (size_t kind = 0; kind < std::size(kPlainZones); ++kind) {
    if (name == kPlainZones[kind].name) return PlainZoneOptions{static_cast<ZoneKind>(kind)};
    absl::StrAppend(&known, kPlainZones[kind].name, ", ");
  }
  if (name == "host") return HostZoneOptions();
  if (name == "device") return DeviceZoneOptions();
  return UnknownName("zone", name, known + "host, device");
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

absl::StatusOr<PromptRows> ParsePromptRows(absl::string_view name) {
  if (name == "auto") return PromptRows::kAuto;
  if (name == "chosen") return PromptRows::kChosen;
  if (name == "all") return PromptRows::kAll;
  return UnknownName("prompt_rows", name, "auto, chosen, all");
}

absl::StatusOr<Budget> ParseBudget(absl::string_view name) {
  if (name == "uniform") return Budget::kUniform;
  if (name == "linear") return Budget::kLinear;
  if (name == "measured") return Budget::kMeasured;
  return UnknownName("budget", name, "uniform, linear, measured");
}

absl::StatusOr<select::Selection> ParseTopK(absl::string_view text) {
  if (text == "all") return select::All();
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value)) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k=", text, " is neither a number nor \"all\""));
  }
  const select::Selection selection = select::TopK{value};
  RETURN_IF_ERROR(select::ValidateSelection(selection, {}));
  return selection;
}

absl::StatusOr<select::Selection> ParseSelection(absl::string_view text) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits(':', 1));
  if (parts.first == "top-k") return ParseTopK(parts.second);
  float value = 0;
  const bool number = absl::SimpleAtof(parts.second, &value);
  if (number && parts.first == "range") return select::Range{value};
  if (number && parts.first == "mass") return select::Mass{value};
  return UnknownName("select", text, "top-k:K, range:B, mass:P with numbers K, B, P");
}

}  // namespace carrel::decoder
