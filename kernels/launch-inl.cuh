// What: launches with what kernels have in common.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"

#define RETURN_IF_FAILED(call)                                                   \
  do {                                                                           \
    if (const cudaError_t error_ = (call); error_ != cudaSuccess) return error_; \
  } while (false)

namespace carrel::kernels {

inline dim3 GridOf(int64_t x, int64_t y = 1, int64_t z = 1) {
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

// Of the current device; 1 where it cannot be asked: a launch will report it.
inline int Multiprocessors() {
  int device = 0, count = 0;
  const bool known =
      cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
  return known ? count : 1;
}

// Of dynamic shared memory.
template <class Kernel>
cudaError_t AllowShared(Kernel* kernel, int64_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

struct LaunchShape {
  dim3 grid;
  int threads = 0;
  int64_t shared_bytes = 0;  // dynamic
  // Where the architecture has both: the launch may begin while the one before it in its stream ends; so many
  // blocks are a cluster.
  bool early = false;
  unsigned cluster = 0;
};

template <class... Params, class... Args>
cudaError_t Launch(const LaunchShape& shape, cudaStream_t stream, void (*kernel)(Params...),
                   const Args&... args) {
  int device = 0, major = 0;
  if (shape.early) {
    RETURN_IF_FAILED(cudaGetDevice(&device));
    RETURN_IF_FAILED(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {shape.cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (major >= 9) config.numAttrs = shape.cluster > 0 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace carrel::kernels
