// What: the portable tile of blocked attention, in registers of one warp: 16 queries against 64 keys at
//       a time, online softmax, mma.sync.m16n8k16 with operands from shared memory by ldmatrix.
//       prefill_attention's mma variant and block_sparse_attention are made of it.
//
// Rows in shared memory are padded by 16 bytes: the eight rows that one ldmatrix reads then lie in
// different banks. Lane l holds of each tile of scores and outputs the rows l / 4 and l / 4 + 8.
#pragma once

#include <cuda_bf16.h>

#include <cmath>

#include "kernels/mma-inl.cuh"

namespace carrel::kernels {

inline constexpr int kFlashKeys = 64;  // per step

template <int D>
inline constexpr int kFlashRow = D + 8;  // elements from one row to the next

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(row)));
}
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(row)));
}

template <int D>
struct FlashTile {
  static constexpr int kRow = kFlashRow<D>;
  static constexpr float kLog2E = 1.4426950408889634f;
  static constexpr float kLn2 = 0.6931471805599453f;

  // q_rows: the warp's 16 queries; key: number of the first of the tile's keys, of which this lane's
  // two rows see those below sees[0] and sees[1]; mask: whether any row of the warp sees fewer than
  // all; scale: of scores, with log2 e. All in shared memory, kRow elements from row to row.
  __device__ __forceinline__ void Step(const __nv_bfloat16* q_rows, const __nv_bfloat16* k_tile,
                                       const __nv_bfloat16* v_tile, int64_t key,
                                       const int64_t (&sees)[2], bool mask, float scale) {
    const int lane = threadIdx.x % 32;
    float s[kFlashKeys / 8][4] = {};
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      uint32_t a[4];
      LoadMatrices(a, q_rows + lane % 16 * kRow + c * 16 + lane / 16 * 8);
#pragma unroll
      for (int j = 0; j < kFlashKeys / 16; ++j) {
        uint32_t b[4];  // keys 16 j ..: (first 8, low half), (first 8, high), (next 8, low), ...
        LoadMatrices(
            b, k_tile + (j * 16 + lane / 16 * 8 + lane % 8) * kRow + c * 16 + lane / 8 % 2 * 8);
        Mma(s[2 * j], a[0], a[1], a[2], a[3], b[0], b[1]);
        Mma(s[2 * j + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
    float new_maximum[2] = {maximum[0], maximum[1]};
#pragma unroll
    for (int j = 0; j < kFlashKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[j][e] *= scale;
        if (mask && key + j * 8 + lane % 4 * 2 + e % 2 >= sees[e / 2]) s[j][e] = -INFINITY;
        new_maximum[e / 2] = fmaxf(new_maximum[e / 2], s[j][e]);
      }
    }
    float base[2];  // finite, so that no difference is NaN
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      new_maximum[r] = fmaxf(new_maximum[r], __shfl_xor_sync(~0u, new_maximum[r], 1));
      new_maximum[r] = fmaxf(new_maximum[r], __shfl_xor_sync(~0u, new_maximum[r], 2));
      base[r] = new_maximum[r] == -INFINITY ? 0.0f : new_maximum[r];
      const float factor = exp2f(maximum[r] - base[r]);
      sum[r] *= factor;
#pragma unroll
      for (int c = 0; c < D / 8; ++c) {
        out[c][2 * r] *= factor;
        out[c][2 * r + 1] *= factor;
      }
      maximum[r] = new_maximum[r];
    }
#pragma unroll
    for (int j = 0; j < kFlashKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[j][e] = exp2f(s[j][e] - base[e / 2]);
        sum[e / 2] += s[j][e];
      }
    }
#pragma unroll
    for (int j = 0; j < kFlashKeys / 16; ++j) {
      const uint32_t a[4] = {PackBf16(s[2 * j][0], s[2 * j][1]), PackBf16(s[2 * j][2], s[2 * j][3]),
                             PackBf16(s[2 * j + 1][0], s[2 * j + 1][1]),
                             PackBf16(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
      for (int c = 0; c < D / 16; ++c) {
        uint32_t b[4];  // (keys low half, columns low), (high, low), (low, high), (high, high)
        LoadMatricesTransposed(b, v_tile + (j * 16 + lane % 16) * kRow + c * 16 + lane / 16 * 8);
        Mma(out[2 * c], a[0], a[1], a[2], a[3], b[0], b[1]);
        Mma(out[2 * c + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
  }

  // Sums over the lanes that share a row; before Store and Lse, once.
  __device__ __forceinline__ void Finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
  }

  // This lane's share of row r (0: l / 4, 1: that + 8), which begins at element `row`; either of the
  // two may be null.
  __device__ __forceinline__ void Store(int r, int64_t row, void* rounded, float* exact) const {
    const float inverse = sum[r] > 0 ? 1.0f / sum[r] : 0.0f;
    const int64_t at = row + threadIdx.x % 4 * 2;
#pragma unroll
    for (int c = 0; c < D / 8; ++c) {
      const float low = out[c][2 * r] * inverse, high = out[c][2 * r + 1] * inverse;
      if (rounded != nullptr) {
        auto* const to = static_cast<__nv_bfloat16*>(rounded) + at + c * 8;
        *reinterpret_cast<uint32_t*>(to) = PackBf16(low, high);
      }
      if (exact != nullptr) {
        *reinterpret_cast<float2*>(exact + at + c * 8) = make_float2(low, high);
      }
    }
  }
  __device__ __forceinline__ float Lse(int r) const {
    return sum[r] > 0 ? (maximum[r] + log2f(sum[r])) * kLn2 : -INFINITY;
  }

  float out[D / 8][4] = {};
  float maximum[2] = {-INFINITY, -INFINITY};  // of scaled scores, in units of ln 2
  float sum[2] = {0, 0};
};

}  // namespace carrel::kernels
