// What:   what makes the K and V of two runs interchangeable, as named values: the model (config
//         and weights), the tokenizer, and the conventions under which rows are stored.
// Source: docs/architecture.md, section 5. The token ids of the document are not part of it: they belong
//         to a context, not to a model.
// Edge:   tokenizer_sha256 empty (a model without a tokenizer) becomes "none".
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "model/config.h"

namespace carrel::model {

// A change of any convention below is a change of its value here, so that old contexts are refused.
inline constexpr char kKvDtype[] = "bf16";
inline constexpr char kKvLayout[] = "layer,kv_head,token,head_dim";
inline constexpr char kKeyPosition[] = "after_rope";  // unless a context is stored
inline constexpr char kKeyPositionNone[] = "none";    // before RoPE: whoever reads gives positions
inline constexpr int kFingerprintFormatVersion = 1;

// Ordered by name, names unique. adapter_sha256 is a field only with an adapter.
std::vector<std::pair<std::string, std::string>> ModelFingerprint(
    const ModelConfig& config, const std::string& weights_sha256,
    const std::string& tokenizer_sha256, const std::string& adapter_sha256 = "");

// The same for contexts whose keys are stored under another key position.
void SetKeyPosition(const std::string& key_position,
                    std::vector<std::pair<std::string, std::string>>& fingerprint);

}  // namespace carrel::model
