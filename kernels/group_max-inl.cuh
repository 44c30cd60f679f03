// The best product that a group of queries has with each of a few keys: the score by which hip and
// infinitehip prune. Keys go from memory to the tensor cores as in dot_score.
#pragma once

#include "kernels/mma-inl.cuh"

namespace carrel::kernels {

// The queries of one KV head, in the registers of a warp. Lane l stands at g = l / 4, t = l % 4.
template <int kDim, bool kWide>
class GroupQueries {
 public:
  // q [group, kDim]; kWide: group > 8.
  __device__ GroupQueries(const uint16_t* q, int group) : group_(group) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int s = 0; s < kShare; ++s) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        q_[s][j] = g + 8 * s < group ? LoadStream16(q + (g + 8 * s) * kDim + 8 * t + 32 * j)
                                     : uint4{0, 0, 0, 0};
      }
    }
  }

  // Eight keys at once: `key` is the row that the lanes of one g name, the same for all four. Every
  // lane gets max over the group of <q, key of g = 2t> in best[0] and of g = 2t + 1 in best[1].
  __device__ void BestProducts(const uint16_t* key, float (&best)[2]) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    uint4 x[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) x[j] = LoadStream16(key + 8 * t + 32 * j);
    float c[4] = {};
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      MmaPair(c, q_[0][j], kWide ? q_[kShare - 1][j] : uint4{0, 0, 0, 0}, x[j]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float max = g < group_ ? c[i] : -INFINITY;
      if (kWide && g + 8 < group_) max = fmaxf(max, c[2 + i]);
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 4));
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 8));
      best[i] = fmaxf(max, __shfl_xor_sync(~0u, max, 16));
    }
  }

 private:
  static constexpr int kLoads = kDim / 32;
  static constexpr int kShare = kWide ? 2 : 1;  // q heads of a lane: g, and g + 8
  const int group_;
  uint4 q_[kShare][kLoads];
};

}  // namespace carrel::kernels
