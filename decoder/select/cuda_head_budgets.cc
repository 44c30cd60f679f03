#include "decoder/select/cuda_head_budgets.h"

#include <algorithm>

#include "decoder/select/cuda_methods.h"

namespace carrel::decoder {

CudaHeadBudgets::CudaHeadBudgets(const CudaZoneShape& shape, cuda::DeviceArena& arena)
    : kv_heads_(shape.heads.kv_heads),
      device_rows_(arena.Take<int32_t>(static_cast<int64_t>(shape.head_budgets.size()))) {
  if (shape.head_budgets.empty()) return;
  totals_.resize(shape.budgets.size());
  for (size_t i = 0; i < shape.head_budgets.size(); ++i) {
    const size_t layer = i / static_cast<size_t>(kv_heads_);
    // Of a dense layer nothing is read.
    const int64_t most = std::max<int64_t>(shape.budgets[layer], 1);
    const int64_t wanted = std::clamp<int64_t>(shape.head_budgets[i], 1, most);
    rows_.push_back(static_cast<int32_t>(std::min<int64_t>(wanted, shape.zone.rows())));
    totals_[layer] += rows_.back();
  }
}

absl::Status CudaHeadBudgets::Load() const { return CopyToDevice(device_rows_, rows_); }

int64_t CudaHeadBudgets::total(Layer layer) const {
  return totals_.empty() ? -1 : totals_[static_cast<size_t>(layer.value())];
}

}  // namespace carrel::decoder
