// What:   every stored K and V row of a context as one safetensors file: k.LAYER, v.LAYER
//         [kv_heads, tokens, head_dim] bf16, token_ids [tokens] i32. Every byte is verified before
//         it is written.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace carrel::tools {

absl::Status DumpRows(const std::string& store_folder, const std::string& context,
                      const std::string& path);

}  // namespace carrel::tools
