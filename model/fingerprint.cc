#include "model/fingerprint.h"

#include <algorithm>

#include "common/status.h"

namespace carrel::model {

std::vector<std::pair<std::string, std::string>> ModelFingerprint(
    const ModelConfig& config, const std::string& weights_sha256,
    const std::string& tokenizer_sha256, const std::string& adapter_sha256) {
  std::vector<std::pair<std::string, std::string>> fields = config.FingerprintFields();
  if (!adapter_sha256.empty()) fields.emplace_back("adapter_sha256", adapter_sha256);
  fields.emplace_back("format_version", absl::StrCat(kFingerprintFormatVersion));
  fields.emplace_back("key_position", kKeyPosition);
  fields.emplace_back("kv_dtype", kKvDtype);
  fields.emplace_back("kv_layout", kKvLayout);
  fields.emplace_back("tokenizer_sha256", tokenizer_sha256.empty() ? "none" : tokenizer_sha256);
  fields.emplace_back("weights_sha256", weights_sha256);
  std::sort(fields.begin(), fields.end());
  for (size_t i = 1; i < fields.size(); ++i) {
    CARREL_CHECK(fields[i - 1].first != fields[i].first);
  }
  return fields;
}

void SetKeyPosition(const std::string& key_position,
                    std::vector<std::pair<std::string, std::string>>& fingerprint) {
  for (auto& [name, value] : fingerprint) {
    if (name == "key_position") value = key_position;
  }
}

}  // namespace carrel::model
