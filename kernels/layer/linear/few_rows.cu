// Products of few tokens on the tensor cores: pieces of rows go from memory to registers in the layout of
// mma-inl.cuh. Sums of an output are those of the same products in the same order however many tokens there are:
// within a warp by chunks of the inner dimension, then over the warps that share it.
#include "kernels/half-inl.cuh"
#include "kernels/launch-inl.cuh"
#include "kernels/layer/linear/linear_cuda.h"
#include "kernels/mma-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kTileRows = 16;
constexpr int kChunk = 4;       // pieces of a row that a warp's load takes: one a lane of a quad
constexpr int kStepChunks = 4;  // of a warp, before the next warp's begin: 256 bytes of a row
constexpr int kStep = kChunk * kStepChunks;

struct Args {
  const uint4* x;
  const uint4* w;
  const float* bias;
  int n;
  int pieces;  // of a row, each of 16 bytes
  int64_t out;
  bool accumulate;
  float* y;
};

// LoadStream16, and the 256 bytes around it into L2: a warp takes all of them, 64 at a time.
__device__ __forceinline__ uint4 LoadWeights(const void* address) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(address));
  return r;
}

template <HalfType kType>
__device__ __forceinline__ void MmaOf(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                      uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (kType == HalfType::kBf16) {
    Mma(c, a0, a1, a2, a3, b0, b1);
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// A lane's pieces of chunks: of each tile of w rows g and g + 8, of each group of 8 tokens token g.
template <int kTiles, int kGroups, int kAhead>
struct Pieces {
  uint4 w[kAhead][kTiles][2], x[kAhead][kGroups];
};

template <HalfType kType, int kTiles, int kGroups, int kAhead>
class Warp {
 public:
  // The part-th of `parts` that share the inner dimension.
  __device__ Warp(const Args& a, int64_t row, int part, int parts)
      : pieces_(a.pieces), part_(part), parts_(parts), t_(threadIdx.x % 4) {
    const int g = threadIdx.x % 32 / 4;
    // Beyond the end the last row, and the last token, are read again; what comes of them is not stored.
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      w_[i / 2][i % 2] = a.w + min(row + 8 * i + g, a.out - 1) * pieces_ + t_;
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      x_[j] = a.x + static_cast<int64_t>(min(8 * j + g, a.n - 1)) * pieces_ + t_;
    }
  }

  // The weights are there before the launch before this one is over, tokens are not.
  __device__ void Walk() {
    const int steps = (pieces_ + kStep - 1) / kStep;
    const int rounds = steps <= part_ ? 0 : (steps - part_ + parts_ - 1) / parts_ * kRoundsOfStep;
    Pieces<kTiles, kGroups, kAhead> pieces[2];
    if (rounds > 0) LoadW(0, pieces[0]);
    WaitForEarlierLaunch();
    if (rounds == 0) return;
    LoadX(0, pieces[0]);
    for (int i = 0; i < rounds; i += 2) {
      if (i + 1 < rounds) Load(i + 1, pieces[1]);
      Multiply(pieces[0]);
      if (i + 1 >= rounds) break;
      if (i + 2 < rounds) Load(i + 2, pieces[0]);
      Multiply(pieces[1]);
    }
  }

  __device__ const float (&sum() const)[kTiles][kGroups][4] { return sum_; }

 private:
  static constexpr int kRoundsOfStep = kStepChunks / kAhead;

  __device__ void Load(int round, Pieces<kTiles, kGroups, kAhead>& to) const {
    LoadW(round, to);
    LoadX(round, to);
  }
  __device__ int FirstPiece(int round) const {
    return (round / kRoundsOfStep * parts_ + part_) * kStep +
           round % kRoundsOfStep * kAhead * kChunk;
  }
  // Zeros beyond the end of a row.
  __device__ void LoadW(int round, Pieces<kTiles, kGroups, kAhead>& to) const {
    const int first = FirstPiece(round);
    const bool whole = first + kAhead * kChunk <= pieces_;
#pragma unroll
    for (int c = 0; c < kAhead; ++c) {
      const int piece = first + kChunk * c;
      const bool inside = whole || piece + t_ < pieces_;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          to.w[c][i][half] = inside ? LoadWeights(w_[i][half] + piece) : uint4{0, 0, 0, 0};
        }
      }
    }
  }
  __device__ void LoadX(int round, Pieces<kTiles, kGroups, kAhead>& to) const {
    const int first = FirstPiece(round);
    const bool whole = first + kAhead * kChunk <= pieces_;
#pragma unroll
    for (int c = 0; c < kAhead; ++c) {
      const int piece = first + kChunk * c;
      const bool inside = whole || piece + t_ < pieces_;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        to.x[c][j] = inside ? *(x_[j] + piece) : uint4{0, 0, 0, 0};
      }
    }
  }

  __device__ void Multiply(const Pieces<kTiles, kGroups, kAhead>& of) {
#pragma unroll
    for (int c = 0; c < kAhead; ++c) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const uint4 &lo = of.w[c][i][0], &hi = of.w[c][i][1];
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
          const uint4& x = of.x[c][j];
          MmaOf<kType>(sum_[i][j], lo.x, hi.x, lo.y, hi.y, x.x, x.y);
          MmaOf<kType>(sum_[i][j], lo.z, hi.z, lo.w, hi.w, x.z, x.w);
        }
      }
    }
  }

  const int pieces_, part_, parts_, t_;
  const uint4* w_[kTiles][2];
  const uint4* x_[kGroups];
  float sum_[kTiles][kGroups][4] = {};
};

// A block's warps are kShares of the inner dimension of kBands bands of kTiles tiles of w's rows.
template <HalfType kType, int kShares, int kBands, int kTiles, int kGroups, int kAhead, int kBlocks>
__global__ void __launch_bounds__(32 * kShares * kBands, kBlocks) FewRowsKernel(const Args a) {
  // Of a tile of each band.
  __shared__ float shared[kBands][kShares][8 * kGroups][kTileRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int band = warp / kShares, part = warp % kShares;
  const int64_t row = (int64_t{blockIdx.x} * kBands + band) * kTiles * kTileRows;
  Warp<kType, kTiles, kGroups, kAhead> walk(a, row, part, kShares);
  walk.Walk();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if (i > 0) __syncthreads();
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        shared[band][part][8 * j + lane % 4 * 2 + c % 2][lane / 4 + c / 2 * 8] =
            walk.sum()[i][j][c];
      }
    }
    __syncthreads();
    for (int at = part * 32 + lane; at < a.n * kTileRows; at += 32 * kShares) {
      const int token = at / kTileRows, r = at % kTileRows;
      const int64_t to = row + kTileRows * i + r;
      if (to >= a.out) continue;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kShares; ++w) sum += shared[band][w][token][r];
      if (a.bias != nullptr) sum += a.bias[to];
      float* const y = a.y + token * a.out + to;
      *y = a.accumulate ? sum + *y : sum;
    }
  }
}

template <HalfType kType, int kShares, int kBands, int kTiles, int kGroups, int kAhead, int kBlocks>
cudaError_t Launch(const Args& a, cudaStream_t stream) {
  constexpr int64_t kRows = kBands * kTiles * kTileRows;
  return kernels::Launch(
      {.grid = GridOf((a.out + kRows - 1) / kRows),
       .threads = 32 * kShares * kBands,
       .early = true},
      stream, FewRowsKernel<kType, kShares, kBands, kTiles, kGroups, kAhead, kBlocks>, a);
}

// Where w has many rows, two bands of them share what a block reads of the tokens.
constexpr int64_t kManyRows = 8192;
constexpr int kParts = 8;  // one number for all: sums depend on it

template <HalfType kType>
cudaError_t LaunchOf(const Args& a, cudaStream_t stream) {
  if (a.n <= 8) return Launch<kType, kParts, 1, 1, 1, 4, 2>(a, stream);
  if (a.n <= 16) return Launch<kType, kParts, 1, 1, 2, 2, 2>(a, stream);
  if (a.out <= kManyRows) return Launch<kType, kParts, 1, 2, 4, 2, 1>(a, stream);
  return Launch<kType, kParts, 2, 2, 4, 1, 1>(a, stream);
}

}  // namespace

cudaError_t FewRowsLinearCuda(const LinearCudaParams& p, cudaStream_t stream) {
  if (p.n < 0 || p.n > kFewRows || p.in < 8 || p.in % 8 != 0 || p.out < 8 || p.out % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  if (p.n == 0) return cudaSuccess;
  const Args a = {static_cast<const uint4*>(p.x),
                  static_cast<const uint4*>(p.w),
                  p.bias,
                  static_cast<int>(p.n),
                  static_cast<int>(p.in / 8),
                  p.out,
                  p.accumulate,
                  p.y};
  return p.type == HalfType::kBf16 ? LaunchOf<HalfType::kBf16>(a, stream)
                                   : LaunchOf<HalfType::kF16>(a, stream);
}

}  // namespace carrel::kernels
