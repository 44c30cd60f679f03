#include "kernels/half-inl.cuh"
#include "kernels/layer/gather_rows/gather_rows_cuda.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;

// What a thread takes of a row at once, and what becomes of it.
template <HalfType kType>
struct HalfPair {
  using In = uint32_t;
  using Out = float2;
  __device__ __forceinline__ static float2 Widen(uint32_t pair) { return UnpackPair<kType>(pair); }
};
template <typename T>
struct Plain {
  using In = T;
  using Out = T;
  __device__ __forceinline__ static T Widen(T x) { return x; }
};

// A block per row.
template <class Piece>
__global__ void __launch_bounds__(kThreads)
    GatherRowsKernel(const typename Piece::In* __restrict__ x, const int32_t* __restrict__ rows,
                     int64_t pieces, typename Piece::Out* __restrict__ y) {
  const auto* const from = x + rows[blockIdx.x] * pieces;
  auto* const to = y + int64_t{blockIdx.x} * pieces;
  for (int64_t c = threadIdx.x; c < pieces; c += kThreads) to[c] = Piece::Widen(from[c]);
}

template <class Piece>
cudaError_t Launch(const void* x, const int32_t* rows, int64_t n, int64_t pieces, float* y,
                   cudaStream_t stream) {
  GatherRowsKernel<Piece><<<static_cast<unsigned>(n), kThreads, 0, stream>>>(
      static_cast<const typename Piece::In*>(x), rows, pieces,
      reinterpret_cast<typename Piece::Out*>(y));
  return cudaGetLastError();
}

bool IsAligned16(const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

}  // namespace

cudaError_t GatherRowsCuda(const float* x, const int32_t* rows, int64_t n, int64_t width, float* y,
                           cudaStream_t stream) {
  if (n < 0 || n > INT32_MAX || width < 1) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  if (width % 4 == 0 && IsAligned16(x) && IsAligned16(y)) {
    return Launch<Plain<float4>>(x, rows, n, width / 4, y, stream);
  }
  return Launch<Plain<float>>(x, rows, n, width, y, stream);
}

cudaError_t GatherHalfRowsCuda(const void* x, const int32_t* rows, int64_t n, int64_t width,
                               float* y, cudaStream_t stream, HalfType type) {
  if (n < 0 || n > INT32_MAX || width < 2 || width % 2 != 0) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  const auto launch = type == HalfType::kBf16 ? Launch<HalfPair<HalfType::kBf16>>
                                              : Launch<HalfPair<HalfType::kF16>>;
  return launch(x, rows, n, width / 2, y, stream);
}

}  // namespace carrel::kernels
