// The Hopper variant. A block takes 128 queries of one head: one warpgroup moves K and V by bulk
// tensor copies, two others compute 64 queries each. While one multiplies, the other does its
// softmax (named barriers hand over the turn), and within a warpgroup S of the next keys is in
// flight beside P V of the last.
#include <cuda.h>
#include <cuda_bf16.h>

#include <cmath>

#include "kernels/attention/prefill_attention/prefill_attention_variants.cuh"
#include "kernels/attention/prefill_attention/wgmma.cuh"

namespace carrel::kernels {
namespace {

constexpr int kQueries = 128;  // of a block
constexpr int kKeys = 128;     // of a step
constexpr int kStages = 2;
constexpr int kGroupThreads = 128;
constexpr int kThreads = 3 * kGroupThreads;
constexpr int kHalf = 64;  // columns of a swizzled tile: 128 bytes

// A tile is D / 64 halves of [128 rows][64 columns].
constexpr int kHalfBytes = kKeys * kHalf * 2;
template <int D>
constexpr int kTileBytes = D / kHalf* kHalfBytes;
// Q, the stages of K and of V, the barriers, and what aligning to 1024 bytes may take.
template <int D>
constexpr int kSharedBytes = kTileBytes<D>*(1 + 2 * kStages) + 128 + 1024;

struct Barriers {
  uint64_t q_full;
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
};
static_assert(sizeof(Barriers) <= 128);

struct KernelParams {
  CUtensorMap q, k, v;
  PrefillAttentionCudaParams p;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using namespace hopper;  // NOLINT: instructions

// Here, since compilers for other architectures complain of what they do not use.
constexpr int kComputeThreads = 2 * kGroupThreads;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <int D>
__device__ __forceinline__ void CopyTile(unsigned char* to, const CUtensorMap& map, int32_t y,
                                         int32_t z, uint64_t* barrier) {
  ArriveExpecting(barrier, kTileBytes<D>);
#pragma unroll
  for (int half = 0; half < D / kHalf; ++half) {
    CopyBox(to + half * kHalfBytes, &map, half * kHalf, y, z, barrier);
  }
}

// s = q k^T for 64 queries and 128 keys.
template <int D>
__device__ __forceinline__ void IssueScores(float (&s)[kKeys / 2], const unsigned char* q,
                                            const unsigned char* k) {
#pragma unroll
  for (int c = 0; c < D / 16; ++c) {
    const int at = c * 16 / kHalf * kHalfBytes + c * 16 % kHalf * 2;
    WgmmaShared(s, TileDescriptor(q + at, 16), TileDescriptor(k + at, 16), c > 0);
  }
}

// out += weights v for 128 keys.
template <int D>
__device__ __forceinline__ void IssueOutput(float (&out)[D / 2], const uint32_t (&weights)[8][4],
                                            const unsigned char* v) {
#pragma unroll
  for (int c = 0; c < kKeys / 16; ++c) {
    WgmmaRegisters(out, weights[c], TileDescriptor(v + c * 16 * kHalf * 2, kHalfBytes));
  }
}

// One warpgroup's running softmax: two rows a thread.
struct Softmax {
  float maximum[2] = {-INFINITY, -INFINITY};  // of scores as multiplied, unscaled
  float sum[2] = {0, 0};
  float factor[2] = {1, 1};  // of what was summed before the last step

  // s becomes weights. `sees`: keys that each row sees, counted from the step's first; masks if
  // `mask`.
  __device__ __forceinline__ void Step(float (&s)[kKeys / 2], float scale, bool mask,
                                       const int (&sees)[2]) {
    if (mask) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const int key = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (key >= sees[i / 2 % 2]) s[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = maximum[r];
#pragma unroll
      for (int i = 0; i < kKeys / 2; i += 4)
        top = fmaxf(top, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float base = top == -INFINITY ? 0.0f : top * scale;  // finite: no NaN
      factor[r] = exp2f(maximum[r] * scale - base);
      maximum[r] = top;
      float added = 0;
#pragma unroll
      for (int i = 0; i < kKeys / 2; i += 4) {
#pragma unroll
        for (int e = i + 2 * r; e < i + 2 * r + 2; ++e) {
          s[e] = exp2f(fmaf(s[e], scale, -base));
          added += s[e];
        }
      }
      sum[r] = sum[r] * factor[r] + added;
    }
  }
};

__device__ __forceinline__ void PackWeights(const float (&s)[kKeys / 2],
                                            uint32_t (&weights)[8][4]) {
#pragma unroll
  for (int c = 0; c < kKeys / 16; ++c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[c][i] = PackBf16(s[8 * c + 2 * i], s[8 * c + 2 * i + 1]);
  }
}

template <int D>
__device__ __forceinline__ void Produce(const KernelParams& params, int64_t first_query, int q_head,
                                        int steps, unsigned char* q_tile, unsigned char* k_tiles,
                                        unsigned char* v_tiles, Barriers& barriers) {
  const int kv_head = q_head / (params.p.q_heads / params.p.kv_heads);
  ArriveExpecting(&barriers.q_full, kTileBytes<D>);
#pragma unroll
  for (int half = 0; half < D / kHalf; ++half) {
    CopyBox(q_tile + half * kHalfBytes, &params.q, half * kHalf, q_head,
            static_cast<int32_t>(first_query), &barriers.q_full);
  }
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kStages;
    const uint32_t parity = (step / kStages + 1) % 2;  // the first wait of a stage passes at once
    Wait(&barriers.k_empty[stage], parity);
    CopyTile<D>(k_tiles + stage * kTileBytes<D>, params.k, step * kKeys, kv_head,
                &barriers.k_full[stage]);
    Wait(&barriers.v_empty[stage], parity);
    CopyTile<D>(v_tiles + stage * kTileBytes<D>, params.v, step * kKeys, kv_head,
                &barriers.v_full[stage]);
  }
}

template <int D>
__device__ __forceinline__ void Store(const PrefillAttentionCudaParams& p, int64_t query,
                                      int q_head, const float (&out)[D / 2], Softmax& softmax) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = softmax.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (query + 8 * r >= p.n) continue;
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
    const int64_t row = (query + 8 * r) * p.q_heads + q_head;
    const int64_t at = row * D + lane % 4 * 2;
#pragma unroll
    for (int c = 0; c < D / 8; ++c) {
      const float low = out[4 * c + 2 * r] * inverse, high = out[4 * c + 2 * r + 1] * inverse;
      if (p.out != nullptr) {
        auto* const to = reinterpret_cast<__nv_bfloat16*>(p.out) + at + c * 8;
        *reinterpret_cast<uint32_t*>(to) = PackBf16(low, high);
      }
      if (p.out_exact != nullptr) {
        *reinterpret_cast<float2*>(p.out_exact + at + c * 8) = make_float2(low, high);
      }
    }
    if (p.lse != nullptr && lane % 4 == 0) {
      p.lse[row] =
          sum > 0 ? (softmax.maximum[r] * p.scale * kLog2E + log2f(sum)) * kLn2 : -INFINITY;
    }
  }
}

template <int D>
__device__ __forceinline__ void Compute(const PrefillAttentionCudaParams& p, int64_t first_query,
                                        int q_head, int steps, int group,
                                        const unsigned char* q_tile, const unsigned char* k_tiles,
                                        const unsigned char* v_tiles, Barriers& barriers) {
  const int thread = threadIdx.x % kGroupThreads;
  const int64_t group_query = first_query + group * 64;
  const int64_t query = group_query + thread / 32 * 16 + thread % 32 / 4;
  const unsigned char* const q = q_tile + group * 64 * kHalf * 2;
  // Named barriers 1 and 2: the turn of each group to issue its products.
  const int turn = 1 + group, other_turn = 2 - group;
  const float scale = p.scale * kLog2E;

  float out[D / 2];
#pragma unroll
  for (int i = 0; i < D / 2; ++i) out[i] = 0;
  float s[kKeys / 2];
  uint32_t weights[8][4];
  Softmax softmax;

  const auto soften = [&](int step) {
    const int64_t key = int64_t{step} * kKeys;
    int sees[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t visible = min(p.rows, p.first_position + query + 8 * r + 1) - key;
      sees[r] = static_cast<int>(max(int64_t{0}, min(visible, int64_t{kKeys})));
    }
    const bool mask = key + kKeys > min(p.rows, p.first_position + group_query + 1);
    softmax.Step(s, scale, mask, sees);
  };

  if (group == 0) NamedArrive(turn, kComputeThreads);  // the first turn
  Wait(&barriers.q_full, 0);
  Wait(&barriers.k_full[0], 0);
  NamedSync(turn, kComputeThreads);
  WgmmaFence();
  IssueScores<D>(s, q, k_tiles);
  WgmmaCommit();
  NamedArrive(other_turn, kComputeThreads);
  WgmmaWait<0>();
  PinRegisters(s);
  if (thread == 0) Arrive(&barriers.k_empty[0]);
  soften(0);
  PackWeights(s, weights);

  for (int step = 1; step < steps; ++step) {
    const int stage = step % kStages, last = (step - 1) % kStages;
    Wait(&barriers.k_full[stage], step / kStages % 2);
    NamedSync(turn, kComputeThreads);
    PinRegisters(s);
    PinRegisters(out);
    WgmmaFence();
    IssueScores<D>(s, q, k_tiles + stage * kTileBytes<D>);
    WgmmaCommit();
    Wait(&barriers.v_full[last], (step - 1) / kStages % 2);
    IssueOutput<D>(out, weights, v_tiles + last * kTileBytes<D>);
    WgmmaCommit();
    NamedArrive(other_turn, kComputeThreads);
    WgmmaWait<1>();
    PinRegisters(s);
    if (thread == 0) Arrive(&barriers.k_empty[stage]);
    soften(step);
    WgmmaWait<0>();
    PinRegisters(out);
    PinRegisters(s);  // the weights in flight are packed over only now
    if (thread == 0) Arrive(&barriers.v_empty[last]);
    PackWeights(s, weights);
#pragma unroll
    for (int i = 0; i < D / 2; ++i) out[i] *= softmax.factor[i / 2 % 2];
  }

  const int last = (steps - 1) % kStages;
  Wait(&barriers.v_full[last], (steps - 1) / kStages % 2);
  PinRegisters(out);
  WgmmaFence();
  IssueOutput<D>(out, weights, v_tiles + last * kTileBytes<D>);
  WgmmaCommit();
  WgmmaWait<0>();
  PinRegisters(out);
  // Group 1 handed its last turn to nobody; group 0 takes it, so that every arrival is met.
  if (group == 0) NamedSync(turn, kComputeThreads);
  Store<D>(p, query, q_head, out, softmax);
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <int D>
__global__ void __launch_bounds__(kThreads, 1)
    WgmmaKernel(const __grid_constant__ KernelParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char unaligned[];
  unsigned char* const q_tile = reinterpret_cast<unsigned char*>(
      (reinterpret_cast<uintptr_t>(unaligned) + 1023) & ~uintptr_t{1023});
  unsigned char* const k_tiles = q_tile + kTileBytes<D>;
  unsigned char* const v_tiles = k_tiles + kStages * kTileBytes<D>;
  Barriers& barriers = *reinterpret_cast<Barriers*>(v_tiles + kStages * kTileBytes<D>);

  const PrefillAttentionCudaParams& p = params.p;
  const int q_head = blockIdx.x;
  const int64_t first_query = int64_t{gridDim.y - 1 - blockIdx.y} * kQueries;  // longest first
  const int64_t last_query = min(first_query + kQueries, p.n) - 1;
  const int64_t keys = min(p.rows, p.first_position + last_query + 1);  // at least one
  const int steps = static_cast<int>((keys + kKeys - 1) / kKeys);

  if (threadIdx.x == 0) {
    InitBarrier(&barriers.q_full, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(&barriers.k_full[stage], 1);
      InitBarrier(&barriers.v_full[stage], 1);
      InitBarrier(&barriers.k_empty[stage], 2);  // one thread of each computing group
      InitBarrier(&barriers.v_empty[stage], 2);
    }
    FenceBarrierInit();
  }
  __syncthreads();

  if (threadIdx.x < kGroupThreads) {
    GiveRegisters<kProducerRegisters>();
    if (threadIdx.x == 0) {
      Produce<D>(params, first_query, q_head, steps, q_tile, k_tiles, v_tiles, barriers);
    }
  } else {
    TakeRegisters<kConsumerRegisters>();
    Compute<D>(p, first_query, q_head, steps, threadIdx.x / kGroupThreads - 1, q_tile, k_tiles,
               v_tiles, barriers);
  }
#else
  __trap();  // dispatch never comes here
#endif
}

using EncodeFunction = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                    const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                    const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, so that nothing links against the driver.
EncodeFunction FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess
             ? reinterpret_cast<EncodeFunction>(function)
             : nullptr;
}

// Boxes of 64 columns, y rows and z of the outermost dimension; what lies outside reads as zero.
bool EncodeMap(CUtensorMap& map, const void* data, int64_t columns, int64_t y, int64_t y_stride,
               int64_t z, int64_t z_stride, uint32_t box_y, uint32_t box_z) {
  static const EncodeFunction encode = FindEncode();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(y),
                              static_cast<cuuint64_t>(z)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(y_stride * 2),
                                static_cast<cuuint64_t>(z_stride * 2)};
  const cuuint32_t box[] = {kHalf, box_y, box_z};
  const cuuint32_t steps[] = {1, 1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <int D>
cudaError_t Launch(const PrefillAttentionCudaParams& p, cudaStream_t stream) {
  KernelParams params;
  params.p = p;
  if (!EncodeMap(params.q, p.q, D, p.q_heads, D, p.n, int64_t{p.q_heads} * D, 1, kQueries) ||
      !EncodeMap(params.k, p.kv.k, D, p.rows, D, p.kv_heads, p.kv.row_stride * D, kKeys, 1) ||
      !EncodeMap(params.v, p.kv.v, D, p.rows, D, p.kv_heads, p.kv.row_stride * D, kKeys, 1)) {
    return cudaErrorInvalidValue;
  }
  const cudaError_t error = cudaFuncSetAttribute(
      WgmmaKernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<D>);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(p.q_heads),
                  static_cast<unsigned>((p.n + kQueries - 1) / kQueries));
  WgmmaKernel<D><<<grid, kThreads, kSharedBytes<D>, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

bool PrefillAttentionWgmmaRuns(int32_t head_dim) {
  if (head_dim != 64 && head_dim != 128) return false;
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (major != 9 || minor != 0) return false;
  // A build without sm_90a has no code of it: its kernel is the trap.
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, WgmmaKernel<64>) != cudaSuccess) return false;
  return attributes.binaryVersion == 90;
}

cudaError_t PrefillAttentionWgmma(const PrefillAttentionCudaParams& params, cudaStream_t stream) {
  return params.head_dim == 64 ? Launch<64>(params, stream) : Launch<128>(params, stream);
}

}  // namespace carrel::kernels
