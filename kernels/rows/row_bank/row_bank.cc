#include "kernels/rows/row_bank/row_bank.h"

namespace carrel::kernels {

RowBank::RowBank(int64_t slots)
    : next_(static_cast<size_t>(slots) + 1),
      previous_(next_.size()),
      held_(static_cast<size_t>(slots), -1) {
  const auto places = static_cast<int32_t>(next_.size());
  for (int32_t i = 0; i < places; ++i) {
    next_[static_cast<size_t>(i)] = (i + 1) % places;
    previous_[static_cast<size_t>((i + 1) % places)] = i;
  }
}

int32_t RowBank::Find(int32_t row) const {
  const auto at = slot_of_.find(row);
  return at == slot_of_.end() ? -1 : at->second;
}

void RowBank::Unlink(int32_t slot) {
  const int32_t next = next_[static_cast<size_t>(slot)];
  const int32_t previous = previous_[static_cast<size_t>(slot)];
  next_[static_cast<size_t>(previous)] = next;
  previous_[static_cast<size_t>(next)] = previous;
}

void RowBank::Append(int32_t slot) {
  const auto none = static_cast<int32_t>(held_.size());
  const int32_t last = previous_.back();
  next_[static_cast<size_t>(last)] = previous_.back() = slot;
  next_[static_cast<size_t>(slot)] = none;
  previous_[static_cast<size_t>(slot)] = last;
}

RowBankUse RowBank::Use(const std::vector<int32_t>& rows) {
  RowBankUse use;
  use.slots.reserve(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    use.slots.push_back(Find(rows[i]));
    if (use.slots.back() < 0) {
      use.misses.push_back(static_cast<int32_t>(i));
    } else {
      Unlink(use.slots.back());
    }
  }
  // What is linked now is unused, and stays before all that is appended.
  for (size_t i = 0; i < rows.size(); ++i) {
    int32_t& slot = use.slots[i];
    if (slot < 0) {
      slot = next_.back();
      Unlink(slot);
      int32_t& held = held_[static_cast<size_t>(slot)];
      if (held >= 0) slot_of_.erase(held);
      held = rows[i];
      slot_of_[held] = slot;
    }
    Append(slot);
  }
  return use;
}

}  // namespace carrel::kernels
