// What: the methods behind cuda_row_selector.h, one file each, and what they share.
// Ownership: as CudaRowSelector; an input is looked at while a selector is made.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/cuda/runtime.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/select/cuda_row_selector.h"

namespace carrel::decoder {

// methods.def names the methods that have a form on a GPU; each has a LayCudaName, which makes a selector
// whose memory lies in the arena, or is planned in it. Only codes may still have kAutoOversample here.
using CudaRowSelectorOr = absl::StatusOr<std::unique_ptr<CudaRowSelector>>;

// What these write is there, for every stream, when they return.
absl::Status CopyToDevice(void* to, const void* from, size_t bytes);
template <typename T>
absl::Status CopyToDevice(T* to, const std::vector<T>& from) {
  return CopyToDevice(to, from.data(), from.size() * sizeof(T));
}
template <typename T>
absl::StatusOr<cuda::DeviceBuffer<T>> ToDevice(const std::vector<T>& values) {
  ASSIGN_OR_RETURN(auto buffer, cuda::DeviceBuffer<T>::Create(static_cast<int64_t>(values.size())));
  RETURN_IF_ERROR(CopyToDevice(buffer.data(), values));
  return buffer;
}

// How many rows each KV head of a layer takes, on the device, where they differ. Its memory is that of the arena.
class CudaHeadBudgets {
 public:
  CudaHeadBudgets() = default;
  CudaHeadBudgets(const CudaZoneShape& shape, cuda::DeviceArena& arena);
  absl::Status Load() const;

  // [kv_heads], each 1 .. the layer's budget; null: every head takes that.
  const int32_t* of(Layer layer) const {
    return device_rows_ == nullptr ? nullptr : device_rows_ + layer.value() * kv_heads_;
  }
  // Of all KV heads; -1 where `of` is null.
  int64_t total(Layer layer) const;

 private:
  int64_t kv_heads_ = 0;
  std::vector<int64_t> totals_;  // [layers], or empty
  std::vector<int32_t> rows_;    // [layers, kv_heads], or empty
  int32_t* device_rows_ = nullptr;
};

}  // namespace carrel::decoder
