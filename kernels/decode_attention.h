// What: what window_attention and sparse_attention have in common on the GPU: how one token's work
//       is split, and the workspace that joins the parts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"

namespace carrel::kernels {

inline constexpr int64_t kMaxDecodeGroup = 16;    // q heads of a KV head
inline constexpr int64_t kMaxDecodeSplits = 256;  // parts of a KV head's rows

// Parts that fill the current device for up to max_rows rows per KV head; in 1 .. kMaxDecodeSplits.
int64_t DecodeSplits(int64_t max_rows, int64_t kv_heads);

// Zeroed once before its first use; every call leaves it ready for the next. One call at a time.
size_t DecodeWorkspaceBytes(int64_t kv_heads, int64_t group, int64_t head_dim, int64_t splits);

}  // namespace carrel::kernels
