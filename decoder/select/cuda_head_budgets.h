// What:    how many rows each KV head of a layer takes, on the device, where they differ.
// Errors:  Make: ResourceExhausted device memory.
// Threads: reentrant.
#pragma once

#include "absl/status/statusor.h"
#include "common/cuda/buffer.h"
#include "decoder/select/cuda_row_selector.h"

namespace carrel::decoder {

class CudaHeadBudgets {
 public:
  static int64_t Bytes(const CudaZoneShape& shape);
  static absl::StatusOr<CudaHeadBudgets> Make(const CudaZoneShape& shape);
  CudaHeadBudgets() = default;

  // [kv_heads], each 1 .. the layer's budget; null: every head takes that.
  const int32_t* of(Layer layer) const {
    return rows_.size() == 0 ? nullptr : rows_.data() + layer.value() * kv_heads_;
  }
  // Of all KV heads; -1 where `of` is null.
  int64_t total(Layer layer) const;
  int64_t bytes() const { return rows_.bytes(); }

 private:
  int64_t kv_heads_ = 0;
  std::vector<int64_t> totals_;       // [layers], or empty
  cuda::DeviceBuffer<int32_t> rows_;  // [layers, kv_heads]
};

}  // namespace carrel::decoder
