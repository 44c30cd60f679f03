// What: launches of several sequences as one: blockIdx.z says whose arguments a block has.
// Bits: a launch for one is the same code: compiled twice, it might add and multiply in one step here and in two
//       there, and a sequence's bits would depend on who is beside it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/launch-inl.cuh"
#include "kernels/most_together.h"

namespace carrel::kernels {

template <class Args>
struct Together {
  static_assert(sizeof(Args) * kMostTogether <= 4000);  // what a launch carries without ado
  Args of[kMostTogether];

  __device__ __forceinline__ const Args& own() const { return of[blockIdx.z]; }
};

// args(params): of each; at most kMostTogether.
template <class Params, class Make>
auto TogetherOf(std::span<const Params> some, Make args) {
  Together<decltype(args(some[0]))> all = {};
  std::transform(some.begin(), some.end(), all.of, args);
  return all;
}

// launch(neighbours) for as few stretches as there may be, of at most kMostTogether, in which alike(first, each).
template <class Params, class Alike, class Launch>
cudaError_t ForStretches(std::span<const Params> all, Alike alike, Launch launch) {
  for (size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    const size_t most = std::min(all.size(), begin + static_cast<size_t>(kMostTogether));
    while (end < most && alike(all[begin], all[end])) ++end;
    RETURN_IF_FAILED(launch(all.subspan(begin, end - begin)));
  }
  return cudaSuccess;
}

}  // namespace carrel::kernels
