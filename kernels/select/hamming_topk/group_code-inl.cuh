// The codes of a group's queries as one set of weighted bits (see hamming_topk.h, Math).
#pragma once

#include "kernels/mma-inl.cuh"

namespace carrel::kernels {

inline constexpr int kMaxHammingGroup = 16;

// Planes that the weights of a group need: |group - 2c| is even for even groups, and is halved.
constexpr int GroupCodePlanes(int group) {
  const int largest = group % 2 == 0 ? group / 2 : group;
  int planes = 0;
  while (largest >> planes != 0) ++planes;
  return planes;
}

template <int kWords, int kPlanes>
struct GroupCode {
  uint32_t majority[kWords];
  uint32_t plane[kPlanes][kWords];
  int best;   // the score of a key that agrees with the majority everywhere
  int shift;  // 1 if the weights were halved

  // By the whole block, into shared memory; more than 32 * kWords threads. Synchronises.
  __device__ void Make(const uint32_t* queries, int group) {
    if (threadIdx.x == 0) {
      best = 0;
      shift = group % 2 == 0 ? 1 : 0;
    }
    __syncthreads();
    const int bit = threadIdx.x, word = bit / 32;
    if (word < kWords) {
      int set = 0;
#pragma unroll 4
      for (int h = 0; h < group; ++h) set += queries[h * kWords + word] >> (bit % 32) & 1;
      const int weight = abs(group - 2 * set);
      const unsigned major = __ballot_sync(~0u, 2 * set > group);
      const int agreeing = __reduce_add_sync(~0u, max(set, group - set));
      if (bit % 32 == 0) {
        majority[word] = major;
        atomicAdd(&best, agreeing);
      }
      const int halved = group % 2 == 0 ? weight / 2 : weight;
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        const unsigned mask = __ballot_sync(~0u, halved >> p & 1);
        if (bit % 32 == 0) plane[p][word] = mask;
      }
    }
    __syncthreads();
  }

  // Scores of an even group are all odd or all even: this keeps their order in half the values.
  __device__ int HalvedScore(const uint32_t (&code)[kWords]) const {
    return (best >> shift) - Lost(code);
  }

 private:
  __device__ int Lost(const uint32_t (&code)[kWords]) const {
    int lost = 0;
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      int count = 0;
      // Four words to three popcounts, which are what limits: the carries of a sum of three.
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = w + i < kWords
                     ? (code[w + i < kWords ? w + i : 0] ^ majority[w + i]) & plane[p][w + i]
                     : 0;
        }
        if (kWords >= 4) {
          const uint32_t carry = (x[0] & x[1]) | (x[0] & x[2]) | (x[1] & x[2]);
          count += __popc(x[0] ^ x[1] ^ x[2]) + __popc(x[3]) + 2 * __popc(carry);
        } else {
          count += __popc(x[0]) + __popc(x[1]);
        }
      }
      lost += count << p;
    }
    return lost;
  }
};

// The code of row j, kWords words at a multiple of 4 kWords bytes.
template <int kWords>
__device__ __forceinline__ void LoadCode(const uint32_t* at, uint32_t (&code)[kWords]) {
  if constexpr (kWords == 2) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(code[0]), "=r"(code[1])
                 : "l"(at));
  } else {
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      const uint4 x = LoadStream16(at + w);
      code[w] = x.x;
      code[w + 1] = x.y;
      code[w + 2] = x.z;
      code[w + 3] = x.w;
    }
  }
}

// The codes that a thread loads in one go, of rows `step` apart: as many as fit its registers
// twice.
template <int kWords>
struct CodeRound {
  static constexpr int kRows = 16 / kWords;
  uint32_t code[kRows][kWords];

  // Beyond the end, nothing.
  __device__ __forceinline__ void Load(const uint32_t* codes, int first, int end, int step) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (first + u * step < end) {
        LoadCode(codes + static_cast<int64_t>(first + u * step) * kWords, code[u]);
      }
    }
  }
};

// Calls take(j, code of row j) for the rows first, first + step, ... below end. `round` has been
// loaded for `first`: so it travels while the caller prepares. Later rounds travel while the one
// before them is dealt with.
template <int kWords, class Take>
__device__ __forceinline__ void ForEachCode(CodeRound<kWords>& round, const uint32_t* codes,
                                            int first, int end, int step, Take take) {
  constexpr int kRows = CodeRound<kWords>::kRows;
  for (int j = first; j < end; j += kRows * step) {
    CodeRound<kWords> next;
    next.Load(codes, j + kRows * step, end, step);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (j + u * step < end) take(j + u * step, round.code[u]);
    }
    round = next;
  }
}

// Calls with(words, planes) as compile-time constants.
template <class With>
cudaError_t WithGroupCode(int64_t bits, int64_t group, With with) {
  const auto with_words = [&](auto words) {
    switch (GroupCodePlanes(static_cast<int>(group))) {
      case 1:
        return with(words, std::integral_constant<int, 1>());
      case 2:
        return with(words, std::integral_constant<int, 2>());
      case 3:
        return with(words, std::integral_constant<int, 3>());
      default:
        return with(words, std::integral_constant<int, 4>());
    }
  };
  switch (bits) {
    case 64:
      return with_words(std::integral_constant<int, 2>());
    case 128:
      return with_words(std::integral_constant<int, 4>());
    default:
      return with_words(std::integral_constant<int, 8>());
  }
}

}  // namespace carrel::kernels
