#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "decoder/lab_options.h"
#include "decoder/select/method_type.h"

namespace carrel::decoder {
namespace {

// A choice per q head.
absl::Status ValidateMask(const RetrievalConfig& config) {
  const SelectorConfig* const selector = SelectorOf(config);
  if (selector == nullptr || selector->mask == SelectorMask::kKvHead) return absl::OkStatus();
  if (config.estimate == Estimate::kOn) {
    return absl::InvalidArgumentError(
        "estimate=on with mask=q-head: the term is of rows that the q heads of a KV head did not "
        "choose together");
  }
  if (std::holds_alternative<FidelityOptions>(config.selection)) {
    return absl::InvalidArgumentError(
        "mask=q-head needs --top-k: a fidelity is planned in rows per KV head");
  }
  if (config.rope != Rope::kTrained) {
    return absl::InvalidArgumentError(
        "mask=q-head with rope=infinitehip: the q heads of a KV head share positions, and so rows");
  }
  return absl::OkStatus();
}

// Positions given here need keys before RoPE in this host's memory.
absl::Status ValidateRope(const RetrievalConfig& config) {
  if (config.rope == Rope::kTrained) return absl::OkStatus();
  const SelectorConfig* const selector = SelectorOf(config);
  if (selector == nullptr) {
    return absl::InvalidArgumentError(
        "rope=infinitehip needs zone=host: a store searches keys after RoPE, and these are stored "
        "before it");
  }
  if (config.estimate == Estimate::kOn) {
    return absl::InvalidArgumentError(
        "estimate=on with rope=infinitehip: summaries are of keys where the document has them");
  }
  if (MethodOf(*selector).after_rope()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rope=infinitehip with method=", SelectorKindName(selector->kind),
        ": codes and labels are made of keys after RoPE; use exact, hip or infinitehip"));
  }
  if (config.beyond_trained) {
    return absl::InvalidArgumentError(
        "beyond_trained is for rope=trained: with infinitehip no position is beyond it");
  }
  return absl::OkStatus();
}

// Positions of their own on a GPU.
absl::Status ValidateCudaRope(const RetrievalConfig& config) {
  const SelectorConfig* const selector = SelectorOf(config);
  if (selector != nullptr && selector->kind != SelectorKind::kInfiniteHip) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rope=infinitehip with device=cuda: method=", SelectorKindName(selector->kind),
        " has no CUDA form; infinitehip has, and with stages=1:1x:1 takes the best rows"));
  }
  if (const auto* host = std::get_if<HostZoneOptions>(&config.zone);
      host != nullptr && host->bank.bytes != 0) {
    return absl::InvalidArgumentError(
        "rope=infinitehip with device=cuda reads rows where they lie: bank_bytes must be 0");
  }
  if (config.measure) {
    return absl::InvalidArgumentError(
        "rope=infinitehip with device=cuda does not measure; device=cpu does");
  }
  return absl::OkStatus();
}

// What a store sends beside partial attention.
absl::Status ValidateWant(const RetrievalConfig& config) {
  if (config.estimate == Estimate::kOn && config.want != Want::kAttend) {
    return absl::InvalidArgumentError(
        "estimate is part of partial attention: it needs want=attend");
  }
  if (config.row_cache_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("row_cache=", config.row_cache_bytes, " is outside [0, infinity)"));
  }
  if (config.row_cache_bytes > 0 && config.want != Want::kRows) {
    return absl::InvalidArgumentError(
        "row_cache keeps rows that the store sent: it needs want=rows");
  }
  if (SelectorOf(config) != nullptr && config.want != Want::kAttend) {
    return absl::InvalidArgumentError(
        "zone=host and zone=device send no queries: nothing travels, so want must be attend");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateLabOptions(const RetrievalConfig& config) {
  const auto* const selection = std::get_if<select::Selection>(&config.selection);
  const bool shares =
      selection != nullptr && (select::IsAll(*selection) || select::TopKRows(*selection) != 0);
  if (!shares && config.budget != Budget::kUniform) {
    return absl::InvalidArgumentError(
        "budget=linear and measured share out a top_k: fidelity, range and mass need "
        "budget=uniform");
  }
  RETURN_IF_ERROR(ValidateWant(config));
  RETURN_IF_ERROR(ValidateRope(config));
  return ValidateMask(config);
}

absl::Status ValidateLabDevice(const DeviceConfig& device, const RetrievalConfig& config) {
  if (device.device == model::Device::kCpu) return absl::OkStatus();
  if (config.rope != Rope::kTrained) RETURN_IF_ERROR(ValidateCudaRope(config));
  if (std::holds_alternative<HostZoneOptions>(config.zone) &&
      config.prefetch == Prefetch::kVerified) {
    return absl::InvalidArgumentError(
        "zone=host with device=cuda: the true query always completes what was fetched ahead; "
        "prefetch must be off or speculative");
  }
  return absl::OkStatus();
}

}  // namespace carrel::decoder
