#include <cmath>

#include "kernels/select/argmax/argmax_cuda.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kNone = INT32_MAX;

struct Best {
  float value;
  int32_t id;  // kNone: nothing seen; -1: a NaN, which beats all
};

__device__ __forceinline__ Best Better(Best a, Best b) {
  if (a.id == -1 || b.id == -1) return a.id == -1 ? a : b;
  if (a.value != b.value) return a.value > b.value ? a : b;
  return a.id < b.id ? a : b;
}

__global__ void __launch_bounds__(kThreads)
    ArgmaxKernel(const float* logits, int64_t count, int32_t* id) {
  __shared__ Best bests[kThreads / 32];
  const float* const row = logits + int64_t{blockIdx.x} * count;
  Best best = {-INFINITY, kNone};
  for (int64_t j = threadIdx.x; j < count; j += kThreads) {
    const float value = row[j];
    best = Better(best, {value, isnan(value) ? -1 : static_cast<int32_t>(j)});
  }
  const auto reduce = [](Best b) {
    for (int step = 16; step > 0; step /= 2) {
      b = Better(b, {__shfl_xor_sync(~0u, b.value, step), __shfl_xor_sync(~0u, b.id, step)});
    }
    return b;
  };
  best = reduce(best);
  if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = reduce(bests[threadIdx.x]);
  if (threadIdx.x == 0) id[blockIdx.x] = best.id;
}

}  // namespace

cudaError_t ArgmaxCuda(const float* logits, int64_t n, int64_t count, int32_t* id,
                       cudaStream_t stream) {
  if (n < 0 || count < 1 || count >= kNone) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  ArgmaxKernel<<<static_cast<unsigned>(n), kThreads, 0, stream>>>(logits, count, id);
  return cudaGetLastError();
}

}  // namespace carrel::kernels
