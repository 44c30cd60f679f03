// Maximum and sum of exponentials of a list of scores in parts.
#pragma once

#include <cuda_runtime.h>

namespace carrel::kernels {

struct SoftmaxState {
  float max, sum;
};

__device__ __forceinline__ SoftmaxState Join(SoftmaxState a, SoftmaxState b) {
  const float max = fmaxf(a.max, b.max);
  if (max == -INFINITY) return {max, 0};
  return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
}

__device__ __forceinline__ SoftmaxState JoinWarp(SoftmaxState state) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) {
    const SoftmaxState other{__shfl_xor_sync(~0u, state.max, m),
                             __shfl_xor_sync(~0u, state.sum, m)};
    state = Join(state, other);
  }
  return state;
}

}  // namespace carrel::kernels
