#include <cuda_bf16.h>

#include "kernels/layer/rope/rope_cuda.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxPairs = kMaxHeadDim / 2 / 32;  // a lane's share of a head

// A block per token, a warp per head in turn; lane l holds elements l + 32 i of each half.
__global__ void __launch_bounds__(kThreads) RopeKernel(RopeCudaParams p) {
  __shared__ float cosines[kMaxHeadDim / 2], sines[kMaxHeadDim / 2];
  const int half = p.head_dim / 2;
  const int64_t token = blockIdx.x;
  const int64_t step = p.step == nullptr ? 0 : *p.step;
  RopeCudaRow at{p.first_position + step + token, p.first_row + step + token, p.kv};
  if (p.rows != nullptr) at = p.rows[token];
  const float position = static_cast<float>(at.position);
  for (int c = threadIdx.x; c < half; c += kThreads) {
    // The angle is a rounded product of two floats, as transformers computes it.
    const float angle = p.inv_freq == nullptr ? 0.0f : __fmul_rn(position, p.inv_freq[c]);
    sincosf(angle, &sines[c], &cosines[c]);
  }
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const int heads = at.kv.k == nullptr ? p.q_heads : p.q_heads + 2 * p.kv_heads;
  const int64_t exact_row = p.q_exact == nullptr        ? -1
                            : p.q_exact_rows == nullptr ? token
                                                        : p.q_exact_rows[token];
  for (int head = threadIdx.x / 32; head < heads; head += kWarps) {
    const bool is_q = head < p.q_heads;
    const bool is_v = head >= p.q_heads + p.kv_heads;
    const float* const from = p.qkv + (token * heads + head) * p.head_dim;
    float low[kMaxPairs], high[kMaxPairs];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kMaxPairs; ++i) {
      const int c = lane + 32 * i;
      if (c >= half) break;
      low[i] = from[c];
      high[i] = from[c + half];
      if (p.bias != nullptr) {
        low[i] += p.bias[head * p.head_dim + c];
        high[i] += p.bias[head * p.head_dim + c + half];
      }
      sum += low[i] * low[i] + high[i] * high[i];
    }
    const float* const norm = is_v ? nullptr : is_q ? p.q_norm : p.k_norm;
    float factor = 1;
    if (norm != nullptr) {  // of the whole warp
      for (int step_ = 16; step_ > 0; step_ /= 2) sum += __shfl_xor_sync(~0u, sum, step_);
      factor = 1.0f / sqrtf(sum / static_cast<float>(p.head_dim) + p.eps);
    }
    const int64_t q_at = (token * p.q_heads + head) * p.head_dim;
    const int64_t exact_at = (exact_row * p.q_heads + head) * p.head_dim;
    __nv_bfloat16* to;
    if (is_q) {
      to = reinterpret_cast<__nv_bfloat16*>(p.q) + q_at;
    } else {
      const int64_t kv_head = is_v ? head - p.q_heads - p.kv_heads : head - p.q_heads;
      to = reinterpret_cast<__nv_bfloat16*>(is_v ? at.kv.v : at.kv.k) +
           (p.layer * at.layer_stride + kv_head * at.kv.row_stride + at.row) * p.head_dim;
    }
#pragma unroll
    for (int i = 0; i < kMaxPairs; ++i) {
      const int c = lane + 32 * i;
      if (c >= half) break;
      float a = low[i], b = high[i];
      if (norm != nullptr) {
        a *= factor * norm[c];
        b *= factor * norm[c + half];
      }
      if (!is_v) {
        a *= p.scale;
        b *= p.scale;
      }
      if (is_q && p.drift != nullptr) {
        a += p.drift[head * p.head_dim + c];
        b += p.drift[head * p.head_dim + c + half];
      }
      if (!is_v) {
        const float rotated = a * cosines[c] - b * sines[c];
        b = b * cosines[c] + a * sines[c];
        a = rotated;
      }
      to[c] = __float2bfloat16_rn(a);
      to[c + half] = __float2bfloat16_rn(b);
      if (is_q && exact_row >= 0) {
        p.q_exact[exact_at + c] = a;
        p.q_exact[exact_at + c + half] = b;
      }
    }
  }
}

}  // namespace

cudaError_t RopeCuda(const RopeCudaParams& params, cudaStream_t stream) {
  if (params.n < 0 || params.head_dim < 2 || params.head_dim % 2 != 0 ||
      params.head_dim > kMaxHeadDim || (params.kv.k == nullptr) != (params.kv.v == nullptr) ||
      (params.rows != nullptr && (params.kv.k != nullptr || params.step != nullptr))) {
    return cudaErrorInvalidValue;
  }
  if (params.n == 0) return cudaSuccess;
  RopeKernel<<<static_cast<unsigned>(params.n), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace carrel::kernels
