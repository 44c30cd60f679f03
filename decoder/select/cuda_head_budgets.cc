#include "decoder/select/cuda_head_budgets.h"

#include <algorithm>

#include "decoder/select/cuda_methods.h"

namespace carrel::decoder {

int64_t CudaHeadBudgets::Bytes(const CudaZoneShape& shape) {
  return static_cast<int64_t>(shape.head_budgets.size() * sizeof(int32_t));
}

absl::StatusOr<CudaHeadBudgets> CudaHeadBudgets::Make(const CudaZoneShape& shape) {
  CudaHeadBudgets out;
  out.kv_heads_ = shape.heads.kv_heads;
  if (shape.head_budgets.empty()) return out;
  std::vector<int32_t> rows;
  out.totals_.resize(shape.budgets.size());
  for (size_t i = 0; i < shape.head_budgets.size(); ++i) {
    const size_t layer = i / static_cast<size_t>(out.kv_heads_);
    // Of a dense layer nothing is read.
    const int64_t most = std::max<int64_t>(shape.budgets[layer], 1);
    const int64_t wanted = std::clamp<int64_t>(shape.head_budgets[i], 1, most);
    rows.push_back(static_cast<int32_t>(std::min<int64_t>(wanted, shape.zone.rows())));
    out.totals_[layer] += rows.back();
  }
  ASSIGN_OR_RETURN(out.rows_, ToDevice(rows));
  return out;
}

int64_t CudaHeadBudgets::total(Layer layer) const {
  return totals_.empty() ? -1 : totals_[static_cast<size_t>(layer.value())];
}

}  // namespace carrel::decoder
