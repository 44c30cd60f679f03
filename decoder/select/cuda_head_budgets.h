// What:    how many rows each KV head of a layer takes, on the device, where they differ.
// Ownership: its memory is that of the arena.
// Threads: reentrant.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "common/cuda/arena.h"
#include "decoder/select/cuda_row_selector.h"

namespace carrel::decoder {

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
