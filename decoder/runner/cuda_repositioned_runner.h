// What:   decoding on a GPU over a context whose keys are stored before RoPE, at positions that
//         attention gives: what RepositionedAttention (repositioned_attention.h) is on the CPU, with
//         method infinitehip. All rows of the context and all new ones lie in one array per layer and KV
//         head, on the device (DeviceZoneOptions) or in pinned memory of this host (HostZoneOptions), which
//         the kernels read, and the new rows' kernel writes, across the bus.
// Math:   that of repositioned_attention.h on keys that are rounded to bf16 once more after they are
//         turned; rows are the CPU's but for ties within that rounding.
// Source: InfiniteHiP (docs/methods.md). Every token is a block of its own to the kernels of sparse
//         prefill (kernels/select/block_prune, kernels/attention/block_sparse_attention).
//         A runner of one sequence: nothing is shared with others.
// Errors: Unimplemented a shape or stages that the kernels do not run (names them); those of runner.h.
// Ownership: copies the rows; keeps none of what it is given.
// Threads: one caller.
// Cost:   no graphs: some 20 launches per layer and token. Memory: 4 bytes * kv_heads * head_dim per
//         layer, token of the context and new token, and the scores of a block's first stage.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "decoder/runner/runner.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<Sequence>> OpenCudaRepositioned(const model::Checkpoint& checkpoint,
                                                               const OpenedContext& context);

}  // namespace carrel::decoder
