// What: the methods behind cuda_row_selector.h, one file each, the device memory that they take, and what
//       they share.
// Ownership: as CudaRowSelector; an input is looked at while a selector is made.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "common/cuda/buffer.h"
#include "common/cuda/runtime.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/select/cuda_row_selector.h"

namespace carrel::decoder {

// Only codes may still have kAutoOversample here.
using CudaRowSelectorOr = absl::StatusOr<std::unique_ptr<CudaRowSelector>>;

struct CudaSelectorInput {
  const CudaZoneShape& shape;
  const CudaKeys& keys;
  const HostRows* host_rows;  // of SelectorNeedsHostRows, otherwise null
  ThreadPool* pool;
  const cuda::Stream& stream;
};

// A method's form on a GPU; methods.def names those that have one.
struct CudaMethod {
  // The device memory that `make` takes.
  absl::StatusOr<int64_t> (*bytes)(const SelectorConfig& config, const CudaZoneShape& shape,
                                   const HostRows* host_rows);
  CudaRowSelectorOr (*make)(const SelectorConfig& config, const CudaSelectorInput& input);
  // Of a fork: what a choice needs beside what was made of keys. Null: it has none.
  absl::StatusOr<int64_t> (*fork_bytes)(const SelectorConfig& config, const CudaZoneShape& shape,
                                        const HostRows* host_rows) = nullptr;
};

// What these write is there, for every stream, when they return.
absl::Status CopyToDevice(void* to, const void* from, size_t bytes);
// A kernel's workspace: zeroed, as they want it.
absl::StatusOr<cuda::DeviceBuffer<uint8_t>> ZeroedDeviceBytes(size_t bytes);

template <typename T>
absl::StatusOr<cuda::DeviceBuffer<T>> ToDevice(const std::vector<T>& values) {
  ASSIGN_OR_RETURN(auto buffer, cuda::DeviceBuffer<T>::Create(static_cast<int64_t>(values.size())));
  RETURN_IF_ERROR(CopyToDevice(buffer.data(), values.data(), values.size() * sizeof(T)));
  return buffer;
}

}  // namespace carrel::decoder
