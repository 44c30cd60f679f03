// What:   CUDA errors as Status.
// Errors: ResourceExhausted for memory; Unavailable where there is no device or driver that serves;
//         Internal otherwise. The message names the call and CUDA's own name of the error.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/cuda/runtime.h"

#define RETURN_IF_CUDA_ERROR(call)                                          \
  do {                                                                      \
    if (const cudaError_t cuda_error_ = (call); cuda_error_ != cudaSuccess) \
      return ::carrel::cuda::CudaStatus(cuda_error_, #call);                \
  } while (false)

namespace carrel::cuda {

// OK for cudaSuccess.
absl::Status CudaStatus(cudaError_t error, absl::string_view call);

}  // namespace carrel::cuda
