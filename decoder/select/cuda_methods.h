// What: the methods behind cuda_row_selector.h, one file each, and the device memory that they take.
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

int64_t CudaExactBytes(const CudaZoneShape& shape);
CudaRowSelectorOr MakeCudaExactSelector(const CudaZoneShape& shape, const CudaKeys& keys);

int64_t CudaHipBytes(const HipConfig& config, const CudaZoneShape& shape);
CudaRowSelectorOr MakeCudaHipSelector(const HipConfig& config, const CudaZoneShape& shape,
                                      const CudaKeys& keys);

int64_t CudaInfiniteHipBytes(const InfiniteHipConfig& config, const CudaZoneShape& shape);
CudaRowSelectorOr MakeCudaInfiniteHipSelector(const InfiniteHipConfig& config,
                                              const CudaZoneShape& shape, const CudaKeys& keys);

absl::StatusOr<int64_t> CudaHashBytes(const HashConfig& config, const CudaZoneShape& shape,
                                      const HostRows* host_rows);
// Of what a choice needs beside codes and directions.
absl::StatusOr<int64_t> CudaHashForkBytes(const HashConfig& config, const CudaZoneShape& shape,
                                          const HostRows* host_rows);
CudaRowSelectorOr MakeCudaHashSelector(const HashConfig& config, const CudaZoneShape& shape,
                                       const CudaKeys& keys, const HostRows* host_rows,
                                       const cuda::Stream& stream);

int64_t CudaChannelBytes(const ChannelConfig& config, const CudaZoneShape& shape);
CudaRowSelectorOr MakeCudaChannelSelector(const ChannelConfig& config, const CudaZoneShape& shape,
                                          const CudaKeys& keys, const HostRows& host_rows,
                                          ThreadPool* pool);

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
