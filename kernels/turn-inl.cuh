// RoPE of bf16 rows on their way through registers, by a table of cosines and sines (block_layout.h).
#pragma once

#include "kernels/block_layout.h"
#include "kernels/mma-inl.cuh"

namespace carrel::kernels {

// Cosines of a position; its sines follow after half a head.
__device__ __forceinline__ const float* AnglesAt(const TurnTable& table, int64_t position,
                                                 int half) {
  return table.angles + min(position, table.positions - 1) * 2 * half;
}

__device__ __forceinline__ float LowFloat(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float HighFloat(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// Products and sums as written: the bits are those of the plain reference.
__device__ __forceinline__ void TurnPair(float& low, float& high, float cosine, float sine) {
  const float turned = __fsub_rn(__fmul_rn(low, cosine), __fmul_rn(high, sine));
  high = __fadd_rn(__fmul_rn(high, cosine), __fmul_rn(low, sine));
  low = turned;
}

// Eight elements of the lower half of a row and their partners of the upper one; cosines and sines
// are theirs. sign -1 turns back.
__device__ __forceinline__ void Turn8(uint4& low, uint4& high, const float* cosines,
                                      const float* sines, float sign) {
  uint32_t* const lows = &low.x;
  uint32_t* const highs = &high.x;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 cosine = __ldg(reinterpret_cast<const float4*>(cosines) + i);
    const float4 sine = __ldg(reinterpret_cast<const float4*>(sines) + i);
    const float c[4] = {cosine.x, cosine.y, cosine.z, cosine.w};
    const float s[4] = {sine.x, sine.y, sine.z, sine.w};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      uint32_t& a = lows[2 * i + e];
      uint32_t& b = highs[2 * i + e];
      float low0 = LowFloat(a), low1 = HighFloat(a), high0 = LowFloat(b), high1 = HighFloat(b);
      TurnPair(low0, high0, c[2 * e], sign * s[2 * e]);
      TurnPair(low1, high1, c[2 * e + 1], sign * s[2 * e + 1]);
      a = PackBf16(low0, low1);
      b = PackBf16(high0, high1);
    }
  }
}

}  // namespace carrel::kernels
