// In place of lab/options.
#include "common/lab.h"
#include "decoder/lab_options.h"

namespace carrel::decoder {

absl::Status ValidateLabOptions(const RetrievalConfig& config) {
  const SelectorConfig* const selector = SelectorOf(config);
  const std::pair<bool, absl::string_view> options[] = {
      {config.want != Want::kAttend, "want other than attend"},
      {config.row_cache_bytes != 0, "row_cache"},
      {config.prefetch == Prefetch::kVerified, "prefetch=verified"},
      {config.budget != Budget::kUniform, "budget other than uniform"},
      {selector != nullptr && selector->mask != SelectorMask::kKvHead, "mask=q-head"},
      {config.rope != Rope::kTrained, "rope=infinitehip"}};
  for (const auto& [asked, name] : options) {
    if (asked) return CheckLab(name);
  }
  return absl::OkStatus();
}

absl::Status ValidateLabDevice(const DeviceConfig&, const RetrievalConfig&) {
  return absl::OkStatus();
}

std::vector<double> LabLayerShares(const RetrievalConfig&, int32_t sparse_layers) {
  return std::vector<double>(static_cast<size_t>(sparse_layers), 1.0);
}

}  // namespace carrel::decoder
