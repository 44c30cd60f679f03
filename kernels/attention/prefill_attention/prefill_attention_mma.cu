// The portable variant: mma.sync.m16n8k16 with cp.async, for every GPU from Ampere on and every
// head_dim that is a multiple of 16.
#include <cuda_bf16.h>

#include <cmath>

#include "kernels/attention/prefill_attention/prefill_attention_variants.cuh"

namespace carrel::kernels {
namespace {

constexpr int kQueries = 64;  // per block: 16 for each of four warps
constexpr int kKeys = 64;     // per step
constexpr int kThreads = 128;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Rows are padded by 16 bytes: the eight rows that one ldmatrix reads then lie in different banks.
template <int D>
constexpr int kRowElements = D + 8;

template <int D>
constexpr int kTileElements = kKeys* kRowElements<D>;

// Q, then two stages of K and V.
template <int D>
constexpr int kSharedBytes = (kQueries * kRowElements<D> + 4 * kTileElements<D>)*2;

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes, or zeros where `valid` is false.
__device__ __forceinline__ void CopyAsync16(void* to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(to)), "l"(from),
               "r"(bytes));
}
__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;"); }
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
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

__device__ __forceinline__ void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Rows [begin, begin + 64) of a matrix whose rows lie `stride` elements apart; zeros from `end` on.
template <int D>
__device__ __forceinline__ void LoadTile(__nv_bfloat16* tile, const __nv_bfloat16* rows,
                                         int64_t stride, int64_t begin, int64_t end) {
  constexpr int kPieces = D / 8;
  for (int i = threadIdx.x; i < 64 * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const bool valid = begin + row < end;
    const int64_t from = valid ? begin + row : 0;
    CopyAsync16(tile + row * kRowElements<D> + piece * 8, rows + from * stride + piece * 8, valid);
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads) MmaKernel(PrefillAttentionCudaParams p) {
  constexpr int kRow = kRowElements<D>;
  extern __shared__ __align__(16) unsigned char shared[];
  __nv_bfloat16* const q_tile = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* const k_tiles = q_tile + kQueries * kRow;
  __nv_bfloat16* const v_tiles = k_tiles + 2 * kTileElements<D>;

  const int q_head = blockIdx.x;
  const int64_t first_query = int64_t{gridDim.y - 1 - blockIdx.y} * kQueries;  // longest first
  const int64_t kv_base = q_head / (p.q_heads / p.kv_heads) * p.kv_stride;
  const __nv_bfloat16* const q = static_cast<const __nv_bfloat16*>(p.q) + q_head * D;
  const __nv_bfloat16* const k = static_cast<const __nv_bfloat16*>(p.k) + kv_base;
  const __nv_bfloat16* const v = static_cast<const __nv_bfloat16*>(p.v) + kv_base;
  const int64_t q_stride = int64_t{p.q_heads} * D;

  const int64_t last_query = min(first_query + kQueries, p.n) - 1;
  const int64_t keys = min(p.rows, p.first_position + last_query + 1);
  const int steps = static_cast<int>((keys + kKeys - 1) / kKeys);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // This thread's two rows of the tile, and how many keys each of them sees.
  const int row = warp * 16 + lane / 4;
  int64_t sees[2];
  for (int r = 0; r < 2; ++r) {
    sees[r] = min(p.rows, p.first_position + first_query + row + 8 * r + 1);
  }
  const int64_t warp_sees_all = min(p.rows, p.first_position + first_query + warp * 16 + 1);

  float out[D / 8][4] = {};
  float maximum[2] = {-INFINITY, -INFINITY};  // of scaled scores, in units of ln 2
  float sum[2] = {0, 0};
  const float scale = p.scale * kLog2E;

  LoadTile<D>(q_tile, q, q_stride, first_query, p.n);
  if (steps > 0) {
    LoadTile<D>(k_tiles, k, D, 0, keys);
    LoadTile<D>(v_tiles, v, D, 0, keys);
  }
  CommitCopies();

  for (int step = 0; step < steps; ++step) {
    const int stage = step % 2;
    if (step + 1 < steps) {
      const int64_t next = int64_t{step + 1} * kKeys;
      LoadTile<D>(k_tiles + (1 - stage) * kTileElements<D>, k, D, next, keys);
      LoadTile<D>(v_tiles + (1 - stage) * kTileElements<D>, v, D, next, keys);
    }
    CommitCopies();
    WaitCopies<1>();
    __syncthreads();
    const __nv_bfloat16* const k_tile = k_tiles + stage * kTileElements<D>;
    const __nv_bfloat16* const v_tile = v_tiles + stage * kTileElements<D>;

    float s[kKeys / 8][4] = {};
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      uint32_t a[4];
      LoadMatrices(a, q_tile + (warp * 16 + lane % 16) * kRow + c * 16 + lane / 16 * 8);
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        uint32_t b[4];  // keys 16 j ..: (first 8, low half), (first 8, high), (next 8, low), ...
        LoadMatrices(
            b, k_tile + (j * 16 + lane / 16 * 8 + lane % 8) * kRow + c * 16 + lane / 8 % 2 * 8);
        Mma(s[2 * j], a, b[0], b[1]);
        Mma(s[2 * j + 1], a, b[2], b[3]);
      }
    }

    const int64_t key = int64_t{step} * kKeys;
    const bool mask = key + kKeys > warp_sees_all;
    float new_maximum[2] = {maximum[0], maximum[1]};
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
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
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[j][e] = exp2f(s[j][e] - base[e / 2]);
        sum[e / 2] += s[j][e];
      }
    }
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      const uint32_t a[4] = {PackBf16(s[2 * j][0], s[2 * j][1]), PackBf16(s[2 * j][2], s[2 * j][3]),
                             PackBf16(s[2 * j + 1][0], s[2 * j + 1][1]),
                             PackBf16(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
      for (int c = 0; c < D / 16; ++c) {
        uint32_t b[4];  // (keys low half, columns low), (high, low), (low, high), (high, high)
        LoadMatricesTransposed(b, v_tile + (j * 16 + lane % 16) * kRow + c * 16 + lane / 16 * 8);
        Mma(out[2 * c], a, b[0], b[1]);
        Mma(out[2 * c + 1], a, b[2], b[3]);
      }
    }
    __syncthreads();  // the next step loads over this stage
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    const int64_t query = first_query + row + 8 * r;
    if (query >= p.n) continue;
    const float inverse = sum[r] > 0 ? 1.0f / sum[r] : 0.0f;
    const int64_t at = query * q_stride + q_head * D + lane % 4 * 2;
#pragma unroll
    for (int c = 0; c < D / 8; ++c) {
      const float low = out[c][2 * r] * inverse, high = out[c][2 * r + 1] * inverse;
      if (p.out != nullptr) {
        auto* const to = static_cast<__nv_bfloat16*>(p.out) + at + c * 8;
        *reinterpret_cast<uint32_t*>(to) = PackBf16(low, high);
      }
      if (p.out_exact != nullptr) {
        *reinterpret_cast<float2*>(p.out_exact + at + c * 8) = make_float2(low, high);
      }
    }
    if (p.lse != nullptr && lane % 4 == 0) {
      p.lse[query * p.q_heads + q_head] =
          sum[r] > 0 ? (maximum[r] + log2f(sum[r])) * kLn2 : -INFINITY;
    }
  }
}

template <int D>
cudaError_t Launch(const PrefillAttentionCudaParams& params, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      MmaKernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<D>);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(params.q_heads),
                  static_cast<unsigned>((params.n + kQueries - 1) / kQueries));
  MmaKernel<D><<<grid, kThreads, kSharedBytes<D>, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t PrefillAttentionMma(const PrefillAttentionCudaParams& params, cudaStream_t stream) {
  switch (params.head_dim) {
    case 16:
      return Launch<16>(params, stream);
    case 32:
      return Launch<32>(params, stream);
    case 64:
      return Launch<64>(params, stream);
    case 96:
      return Launch<96>(params, stream);
    case 128:
      return Launch<128>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace carrel::kernels
