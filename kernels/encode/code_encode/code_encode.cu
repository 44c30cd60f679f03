// A block of threads takes 64 keys at a time: the map lies in shared memory, transposed, the keys
// beside it, and a thread holds the products of 4 keys with some bits. They then go to shared
// memory, where the stages' signs are taken in turn and packed.
#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/encode/code_encode/code_encode.h"
#include "kernels/launch-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kKeys = 64;    // of a block of codes
constexpr int kBlocks = 24;  // of threads, at most: more would not make the bus faster
constexpr int64_t kMaxHeadDim = 256, kMaxMap = 32768;

int64_t SharedBytes(int64_t head_dim, int64_t bits) {
  return 4 * (bits * head_dim + kKeys * std::max(head_dim, bits + 1));
}

// Where element c of a key lies among the keys: turned so that a warp's stores spread over banks.
__device__ __forceinline__ int KeyAt(int c, int key) {
  return c * kKeys + (key + 4 * (c / 8)) % kKeys;
}

template <int kBits>
__global__ void __launch_bounds__(kThreads) CodeEncodeKernel(const CodeEncodeParams p) {
  constexpr int kThreadBits = kBits / 16;  // of its 4 keys
  constexpr int kStride = kBits + 1;
  extern __shared__ float map[];  // [head_dim, kBits]
  const auto dim = static_cast<int>(p.head_dim);
  float* const keys = map + dim * kBits;  // [head_dim, kKeys]; then products [kKeys, kStride]
  float* const products = keys;
  const int thread = threadIdx.x;
  const int key4 = thread % 16 * 4, bit0 = thread / 16 * kThreadBits;
  for (int i = thread; i < kBits * dim; i += kThreads) {
    map[i] = p.matrix[static_cast<int64_t>(i % kBits) * dim + i / kBits];
  }

  for (int64_t first = int64_t{blockIdx.x} * kKeys; first < p.rows;
       first += int64_t{gridDim.x} * kKeys) {
    const auto count = static_cast<int>(min(int64_t{kKeys}, p.rows - first));
    __syncthreads();             // the products of the keys before are done with
    const int pieces = dim / 8;  // of 16 bytes
    for (int i = thread; i < kKeys * pieces; i += kThreads) {
      const int key = i / pieces, c = i % pieces * 8;
      uint4 x = {};
      if (key < count) x = *reinterpret_cast<const uint4*>(p.x + (first + key) * dim + c);
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        keys[KeyAt(c + 2 * w, key)] = __uint_as_float(words[w] << 16);
        keys[KeyAt(c + 2 * w + 1, key)] = __uint_as_float(words[w] & 0xffff0000u);
      }
    }
    float sums[4][kThreadBits];
#pragma unroll
    for (int b = 0; b < kThreadBits; ++b) {
      const float offset = p.offset[bit0 + b];
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[k][b] = offset;
    }
    __syncthreads();
    for (int c = 0; c < dim; ++c) {
      const float4 x = *reinterpret_cast<const float4*>(keys + KeyAt(c, key4));
#pragma unroll
      for (int b = 0; b < kThreadBits; b += 4) {
        const float4 m = *reinterpret_cast<const float4*>(map + c * kBits + bit0 + b);
        const float row[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[0][b + i] = fmaf(x.x, row[i], sums[0][b + i]);
          sums[1][b + i] = fmaf(x.y, row[i], sums[1][b + i]);
          sums[2][b + i] = fmaf(x.z, row[i], sums[2][b + i]);
          sums[3][b + i] = fmaf(x.w, row[i], sums[3][b + i]);
        }
      }
    }
    __syncthreads();  // products take the place of keys
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int b = 0; b < kThreadBits; ++b) products[(key4 + k) * kStride + bit0 + b] = sums[k][b];
    }
    __syncthreads();
    if (p.feedback != nullptr) {
      const auto stage = static_cast<int>(p.stage_bits);
      float* const y = products + thread % kKeys * kStride;
      for (int from = 0; from + stage < kBits; from += stage) {
        for (int i = from + stage + thread / kKeys; i < kBits; i += kThreads / kKeys) {
          const float* const said = p.feedback + static_cast<int64_t>(i) * kBits;
          float sum = 0;
          for (int j = from; j < from + stage; ++j) sum += y[j] > 0 ? said[j] : -said[j];
          y[i] -= sum;
        }
        __syncthreads();
      }
    }
    // A byte of each of four neighbours in the block: keys k, k + 32, k + 1, k + 33.
    auto* const out = reinterpret_cast<uint32_t*>(p.blocks + first / kKeys * (kBits / 8 * kKeys));
    for (int i = thread; i < kBits / 8 * kKeys / 4; i += kThreads) {
      const int row = i / (kKeys / 4), key = i % (kKeys / 4) * 2;
      uint32_t word = 0;
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const int of = key + byte / 2 + byte % 2 * 32;
        if (of >= count) continue;
        const float* const y = products + of * kStride + 8 * row;
#pragma unroll
        for (int b = 0; b < 8; ++b) word |= (y[b] > 0 ? 1u : 0u) << (8 * byte + b);
      }
      out[i] = word;
    }
  }
}

template <int kBits>
cudaError_t Launch(const CodeEncodeParams& p, cudaStream_t stream) {
  const auto shared = static_cast<int>(SharedBytes(p.head_dim, kBits));
  RETURN_IF_FAILED(AllowShared(CodeEncodeKernel<kBits>, shared));
  const int64_t blocks = std::min<int64_t>(kBlocks, (p.rows + kKeys - 1) / kKeys);
  CodeEncodeKernel<kBits>
      <<<static_cast<unsigned>(blocks), kThreads, static_cast<size_t>(shared), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

bool CodeEncodeHas(int64_t head_dim, int64_t bits) {
  if (head_dim < 8 || head_dim > kMaxHeadDim || head_dim % 8 != 0 ||
      (bits != 64 && bits != 128 && bits != 256) || bits * head_dim > kMaxMap) {
    return false;
  }
  int device = 0, shared = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) ==
             cudaSuccess &&
         SharedBytes(head_dim, bits) <= shared;
}

cudaError_t CodeEncode(const CodeEncodeParams& p, cudaStream_t stream) {
  if (!CodeEncodeHas(p.head_dim, p.bits) || p.rows < 0 ||
      (p.feedback != nullptr && (p.stage_bits < 1 || p.bits % p.stage_bits != 0))) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  return p.bits == 64    ? Launch<64>(p, stream)
         : p.bits == 128 ? Launch<128>(p, stream)
                         : Launch<256>(p, stream);
}

}  // namespace carrel::kernels
