// What:   which earlier tokens a token of the document attends to while it is prefilled, and where
//         keys stand then and in the store. Attention is written "NAME" or "NAME:key=value,..".
// Source: docs/methods.md.
// Errors: InvalidArgument an unknown name or key, a value outside its bounds, what does not go
//         together: names it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/config.h"
#include "model/rope_mode.h"

namespace carrel::prefill {

enum class AttentionKind : uint8_t { kDense = 0, kHip = 1, kInfiniteHip = 2 };
enum class KeyPosition : uint8_t { kAfterRope = 0, kNone = 1 };

struct AttentionConfig {
  AttentionKind kind = AttentionKind::kDense;
  // Of hip and infinitehip, in tokens:
  int64_t rows = 2048;    // chosen per KV head and block of queries: 16 .. 2^20
  int64_t sink = 256;     // first tokens of the document, always attended: 0 .. 2^20
  int64_t window = 1024;  // tokens before the block, always attended: 0 .. 2^20
  int64_t block_q = 64;   // tokens that share a choice: 16, 32, 64 or 128
  int64_t stride_q = 4;   // every so manieth of them is asked for it: 1 .. block_q
  int64_t block_k = 2;    // hip: keys per block: 1 .. 64

  model::Rope rope = model::Rope::kTrained;
  KeyPosition key_position = KeyPosition::kAfterRope;  // as stored
};

// dense
// hip:rows=,sink=,window=,block_q=,stride_q=,block_k=
// infinitehip:rows=,sink=,window=,block_q=,stride_q=
// Leaves rope and key_position as they are by default.
absl::StatusOr<AttentionConfig> ParseAttention(absl::string_view text);
absl::StatusOr<KeyPosition> ParseKeyPosition(absl::string_view name);

absl::Status ValidateAttention(const AttentionConfig& config, const model::ModelConfig& model);

// As ParseAttention reads it, every parameter written out: for the manifest.
std::string AttentionText(const AttentionConfig& config);
absl::string_view KeyPositionName(KeyPosition position);

}  // namespace carrel::prefill
