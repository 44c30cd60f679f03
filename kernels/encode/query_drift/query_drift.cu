#include "kernels/encode/query_drift/query_drift_cuda.h"

namespace carrel::kernels {
namespace {

// A block per head, a thread per pair of elements that RoPE turns.
__global__ void LearnQueryDriftKernel(const QueryDriftCudaParams p) {
  const int64_t half = p.head_dim / 2, width = p.heads * p.head_dim;
  const int64_t low = blockIdx.x * p.head_dim + threadIdx.x, high = low + half;
  const int64_t first = p.first_position + (p.step == nullptr ? 0 : *p.step);
  const float inv_freq = p.inv_freq == nullptr ? 0.0f : p.inv_freq[threadIdx.x];
  const float known_low = p.mean[low], known_high = p.mean[high];
  float mean_low = known_low, mean_high = known_high;
  int32_t tokens = p.tokens[blockIdx.x];
  for (int64_t i = 0; i < p.n; ++i) {
    const int64_t row = i * width;
    const float a = p.q[row + low] - p.predicted_q[row + low];
    const float b = p.q[row + high] - p.predicted_q[row + high];
    float sine, cosine;
    sincosf(__fmul_rn(static_cast<float>(first + i), inv_freq), &sine, &cosine);
    const float weight = fmaxf(p.newest, 1.0f / static_cast<float>(++tokens));
    mean_low += weight * (known_low + a * cosine + b * sine - mean_low);
    mean_high += weight * (known_high + b * cosine - a * sine - mean_high);
  }
  p.mean[low] = mean_low;
  p.mean[high] = mean_high;
  __syncthreads();  // every thread has read the count
  if (threadIdx.x == 0) p.tokens[blockIdx.x] = tokens;
}

}  // namespace

cudaError_t LearnQueryDriftCuda(const QueryDriftCudaParams& p, cudaStream_t stream) {
  if (p.n < 0 || p.heads < 1 || p.heads > INT32_MAX || p.head_dim < 2 || p.head_dim % 2 != 0 ||
      p.head_dim > 2048) {
    return cudaErrorInvalidValue;
  }
  if (p.n == 0) return cudaSuccess;
  LearnQueryDriftKernel<<<static_cast<unsigned>(p.heads), static_cast<unsigned>(p.head_dim / 2), 0,
                          stream>>>(p);
  return cudaGetLastError();
}

}  // namespace carrel::kernels
