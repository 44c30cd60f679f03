// What:   what a GPU does of index building during prefill: it encodes keys (kernels/code_encode)
//         where they lie in pinned memory, beside the forward pass; where Faiss has its GPU half,
//         that finds queries' nearest keys and trains lists.
// Errors: as kvstore/index/accelerator.h; of Make: ResourceExhausted device or pinned memory;
//         FailedPrecondition a build without CUDA.
// Threads: any; eight callers work at once, others wait.
// Cost:   3.2 MB of device memory; of pinned memory 256 bytes per token.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kvstore/index/accelerator.h"

namespace carrel::prefill {

// tokens: rows of a head at most; more are not served. Keys must be readable by the device: pinned.
absl::StatusOr<std::unique_ptr<kvstore::Accelerator>> MakeCudaAccelerator(int64_t tokens);

}  // namespace carrel::prefill
