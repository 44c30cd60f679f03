// What: rows packed and laid down where a kernel reads them. Tests only.
#pragma once

#include <memory>
#include <vector>

#include "kernels/gpu_test_data.h"
#include "kernels/rows/packed_rows/packed_rows_cuda.h"

namespace carrel::kernels {

// k, v [kv_heads, rows, head_dim]. Tops are chosen by the first rows alone: there are exceptions.
class PackedInput {
 public:
  PackedInput(const uint16_t* k, const uint16_t* v, int64_t kv_heads, int64_t rows,
              int64_t head_dim)
      : rows_(rows) {
    const int64_t row_bytes = PackedRowBytes(head_dim);
    std::vector<PackedHead> heads(static_cast<size_t>(kv_heads));
    std::vector<uint8_t> packed(static_cast<size_t>(kv_heads * rows * row_bytes));
    ExceptionPieces exceptions;
    for (int64_t g = 0; g < kv_heads; ++g) {
      PackedHead& head = heads[static_cast<size_t>(g)];
      const int64_t at = g * rows * head_dim, sample = std::min<int64_t>(rows, 50);
      ChooseTopExponents(k + at, sample, head_dim, head.top_exponent[0]);
      ChooseTopExponents(v + at, sample, head_dim, head.top_exponent[1]);
      PackRows(head, k + at, v + at, rows, head_dim, packed.data() + g * rows * row_bytes,
               &exceptions);
    }
    exceptions_ = static_cast<int64_t>(exceptions.all().size());
    device_rows_ = std::make_unique<DeviceInput<uint8_t>>(packed);
    device_heads_ = std::make_unique<DeviceInput<PackedHead>>(heads);
    device_exceptions_ = std::make_unique<DeviceInput<RowPiece>>(exceptions.all());
  }

  PackedRows get() const {
    return {device_rows_->data(), device_heads_->data(), device_exceptions_->data(), rows_};
  }
  int64_t exceptions() const { return exceptions_; }

 private:
  const int64_t rows_;
  int64_t exceptions_ = 0;
  std::unique_ptr<DeviceInput<uint8_t>> device_rows_;
  std::unique_ptr<DeviceInput<PackedHead>> device_heads_;
  std::unique_ptr<DeviceInput<RowPiece>> device_exceptions_;
};

}  // namespace carrel::kernels
