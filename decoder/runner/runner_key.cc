#include "decoder/runner/runner_key.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace carrel::decoder {

std::string RunnerKey(const model::Checkpoint& checkpoint) {
  std::string key = absl::StrFormat("%p %p", checkpoint.weights.get(), checkpoint.adapter.get());
  for (const auto& [name, value] : checkpoint.config.FingerprintFields()) {
    absl::StrAppend(&key, " ", name, "=", value);
  }
  return key;
}

}  // namespace carrel::decoder
