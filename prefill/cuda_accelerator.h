// What:   what a GPU does of index building during prefill: it encodes keys (kernels/encode/code_encode)
//         where they lie in pinned memory, beside the forward pass, and makes summaries of rows
//         (cuda_summaries.h); where Faiss has its GPU half, that finds queries' nearest keys and
//         trains lists.
// Errors: as kvstore/index/building/accelerator.h; of Make: ResourceExhausted device or pinned memory;
//         FailedPrecondition a build without CUDA.
// Threads: any; eight callers work at once, others wait.
// Cost:   CudaAcceleratorBytes of device memory, at most 143 MB; of pinned memory 260 bytes per
//         token.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kvstore/index/building/accelerator.h"

namespace carrel::prefill {

// tokens: rows of a head at most; more are not served. Rows must be readable by the device: pinned.
// summaries: whether they are wanted; otherwise no memory is kept for them and none are served.
absl::StatusOr<std::unique_ptr<kvstore::Accelerator>> MakeCudaAccelerator(int64_t tokens,
                                                                          bool summaries);
// Of device memory, but for Faiss's own.
int64_t CudaAcceleratorBytes(int64_t tokens, bool summaries);

}  // namespace carrel::prefill
