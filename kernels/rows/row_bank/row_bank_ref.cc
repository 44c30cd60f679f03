#include <numeric>

#include "kernels/rows/row_bank/row_bank.h"

namespace carrel::kernels {

RefRowBank::RefRowBank(int64_t slots)
    : order_(static_cast<size_t>(slots)), held_(static_cast<size_t>(slots), -1) {
  std::iota(order_.begin(), order_.end(), 0);
}

RowBankUse RefRowBank::Use(const std::vector<int32_t>& rows) {
  RowBankUse use;
  std::vector<bool> used(held_.size(), false);
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto at = slot_of_.find(rows[i]);
    use.slots.push_back(at == slot_of_.end() ? -1 : at->second);
    if (at == slot_of_.end()) {
      use.misses.push_back(static_cast<int32_t>(i));
    } else {
      used[static_cast<size_t>(at->second)] = true;
    }
  }
  std::vector<int32_t> order;
  size_t next_miss = 0;
  for (const int32_t slot : order_) {
    if (used[static_cast<size_t>(slot)]) continue;
    if (next_miss == use.misses.size()) {
      order.push_back(slot);
      continue;
    }
    const auto i = static_cast<size_t>(use.misses[next_miss++]);
    int32_t& held = held_[static_cast<size_t>(slot)];
    slot_of_.erase(held);
    held = rows[i];
    slot_of_[held] = slot;
    use.slots[i] = slot;
  }
  order.insert(order.end(), use.slots.begin(), use.slots.end());
  order_ = std::move(order);
  return use;
}

}  // namespace carrel::kernels
