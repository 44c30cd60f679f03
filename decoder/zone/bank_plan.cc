#include "decoder/zone/bank_plan.h"

#include <algorithm>
#include <cmath>

#include "common/status.h"
#include "kernels/rows/row_bank/row_bank.h"

namespace carrel::decoder {
namespace {

// The most slots in `bytes`, at least `slots`, which fit.
int64_t MostSlots(const AttentionShape& shape, kernels::RowMap map, int64_t rows, int64_t slots,
                  int64_t bytes) {
  if (BankBytes(shape, map, rows, rows) <= bytes) return rows;
  int64_t beyond = std::min(rows, kernels::kMaxBankSlots + 1);
  while (beyond - slots > 1) {
    const int64_t middle = slots + (beyond - slots) / 2;
    (BankBytes(shape, map, rows, middle) <= bytes ? slots : beyond) = middle;
  }
  return slots;
}

}  // namespace

int64_t BankPlan::most_chosen() const {
  int64_t most = 0;
  for (size_t l = 0; l < attended.size(); ++l) {
    if (chooses(l)) most = std::max(most, attended[l]);
  }
  return most;
}

int64_t BankBytes(const AttentionShape& shape, kernels::RowMap map, int64_t rows, int64_t slots) {
  const kernels::RowBankShape bank{.kv_heads = shape.kv_heads,
                                   .head_dim = shape.head_dim,
                                   .slots = slots,
                                   .rows = rows,
                                   .map = map};
  if (slots == 0) return 0;
  return kernels::RowBankRowBytes(bank) + (slots == rows ? 0 : kernels::RowBankLayout(bank).bytes);
}

absl::StatusOr<BankPlan> PlanBanks(const std::vector<select::Selection>& selections,
                                   Prefetch prefetch, const BankConfig& bank,
                                   const AttentionShape& shape, int64_t rows) {
  BankPlan plan;
  plan.rows = rows;
  for (const select::Selection& selection : selections)
    plan.attended.push_back(select::MostRows(selection, rows));
  plan.slots.assign(static_cast<size_t>(shape.layers), 0);
  plan.ahead.assign(static_cast<size_t>(shape.layers), 0);
  if (bank.bytes == 0) return plan;

  int64_t choosing = 0, left = bank.bytes;
  for (size_t l = 0; l < plan.slots.size(); ++l) {
    if (!plan.chooses(l)) continue;
    // Nothing comes before the first layer.
    if (prefetch == Prefetch::kSpeculative && l > 0) {
      plan.ahead[l] =
          std::min<int64_t>(rows, std::llround(bank.ahead * static_cast<double>(plan.attended[l])));
    }
    plan.slots[l] = std::max(plan.attended[l], plan.ahead[l]);
    if (plan.slots[l] > kernels::kMaxBankSlots) {
      return absl::InvalidArgumentError(
          absl::StrCat("bank: layer ", l, " names ", plan.slots[l],
                       " rows per KV head and token; a bank has at most ", kernels::kMaxBankSlots));
    }
    left -= BankBytes(shape, bank.map, rows, plan.slots[l]);
    ++choosing;
  }
  if (left < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "bank_bytes=", bank.bytes, " do not hold the rows that one token attends to: at least ",
        bank.bytes - left, " bytes are needed for ", choosing, " layers, or 0 for no banks"));
  }
  for (size_t l = 0; l < plan.slots.size(); ++l) {
    const int64_t all = BankBytes(shape, bank.map, rows, rows);
    if (plan.chooses(l) || all > left) continue;
    plan.slots[l] = rows;
    left -= all;
  }
  for (size_t l = 0; l < plan.slots.size(); ++l) {
    if (!plan.chooses(l) || plan.holds_all(l)) continue;
    const int64_t least = BankBytes(shape, bank.map, rows, plan.slots[l]);
    plan.slots[l] = MostSlots(shape, bank.map, rows, plan.slots[l], least + left / choosing);
  }
  for (size_t l = 0; l < plan.slots.size(); ++l) {
    if (plan.holds_all(l)) plan.ahead[l] = 0;
  }
  return plan;
}

}  // namespace carrel::decoder
