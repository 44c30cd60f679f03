// What: pairs of 16-bit floats of either type (half_type.h) from and to fp32, in device code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/half_type.h"

namespace carrel::kernels {

// The first in the low half.
template <HalfType kType>
__device__ __forceinline__ uint32_t PackPair(float first, float second) {
  if constexpr (kType == HalfType::kBf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    constexpr float kMax = 65504;
    const auto bounded = [](float x) {
      return x > kMax ? kMax : x < -kMax ? -kMax : x;
    };  // NaN stays
    const __half2 pair = __floats2half2_rn(bounded(first), bounded(second));
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <HalfType kType>
__device__ __forceinline__ float2 UnpackPair(uint32_t pair) {
  if constexpr (kType == HalfType::kBf16) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

}  // namespace carrel::kernels
