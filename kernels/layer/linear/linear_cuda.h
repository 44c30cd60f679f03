// What:   y = x W^T + b on the GPU, bf16 or f16 with fp32 sums: cuBLASLt, and a kernel of our own
//         for few tokens, whose time is that of reading the weights.
// Math:   y[i, o] = (accumulate ? y[i, o] : 0) + sum_c x[i, c] * w[o, c] + bias[o]
// Shapes: x [n, in], w [out, in] of `type`, y [n, out] f32, bias [out] f32 or null; contiguous
//         device memory, 16-byte aligned; in and out multiples of 8.
// Edge:   n == 0 does nothing.
// Errors: cudaErrorInvalidValue sizes that do not fit; cudaErrorUnknown what cuBLASLt refuses.
// Threads: one caller at a time per object, and one stream at a time: the workspace is shared.
//          Only enqueues; a shape met for the first time costs some 100 us of the host.
// Bits:   FewRowsLinearCuda: a token's sums do not depend on n, nor on the other tokens.
// Cost:   n <= kFewRows: reads w once at memory speed.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/cuda/runtime.h"
#include "kernels/half_type.h"

namespace carrel::kernels {

struct LinearCudaParams {
  const void* x = nullptr;
  const void* w = nullptr;
  const float* bias = nullptr;
  int64_t n = 0;
  int64_t in = 0;
  int64_t out = 0;
  float* y = nullptr;
  bool accumulate = false;
  HalfType type = HalfType::kBf16;
};

inline constexpr int64_t kFewRows = 32;
cudaError_t FewRowsLinearCuda(const LinearCudaParams& params,
                              cudaStream_t stream);  // n <= kFewRows

class LinearCuda {
 public:
  static constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

  // workspace: kWorkspaceBytes of device memory that outlive this, 256-byte aligned.
  static absl::StatusOr<std::unique_ptr<LinearCuda>> Create(void* workspace);
  virtual ~LinearCuda() = default;

  // FewRowsLinearCuda for up to kFewRows tokens, else Gemm.
  cudaError_t Run(const LinearCudaParams& params, cudaStream_t stream) {
    return params.n <= kFewRows ? FewRowsLinearCuda(params, stream) : Gemm(params, stream);
  }
  virtual cudaError_t Gemm(const LinearCudaParams& params, cudaStream_t stream) = 0;
};

}  // namespace carrel::kernels
