// What:   how the bytes of the GPU's banks are shared out over the layers, for a zone in this
//         host's memory.
// Math:   1. Every layer that chooses rows gets as many slots as one token names in it.
//         2. Layers that attend to every row come next, the first of them first, as long as all of
//         a layer's rows find room: each is used by every token, so no byte serves better.
//         3. What is left is shared evenly over the layers that choose rows, up to all rows.
// Edge:   no bytes: no banks. A layer of 2 that finds no room is read where its rows lie.
// Errors: InvalidArgument fewer bytes than 1 needs: a token's rows would push each other out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "decoder/config.h"

namespace carrel::decoder {

struct BankPlan {
  // Of each layer, per KV head.
  std::vector<int64_t> attended;  // rows that a token attends to, at most
  std::vector<int64_t> ahead;     // rows asked for ahead of it; 0: none
  std::vector<int64_t> slots;     // 0: rows are read where they lie; all rows: they are all held
  int64_t rows = 0;               // of the zone

  bool chooses(size_t layer) const { return attended[layer] < rows; }
  bool holds_all(size_t layer) const { return slots[layer] == rows; }
  bool has_bank(size_t layer) const { return slots[layer] > 0 && !holds_all(layer); }
  // The most of any layer; 0: none.
  int64_t most_chosen() const;
  int64_t most_ahead() const {
    return ahead.empty() ? 0 : *std::max_element(ahead.begin(), ahead.end());
  }
};

// Device bytes of a layer's bank: rows, order, page table.
int64_t BankBytes(const AttentionShape& shape, kernels::RowMap map, int64_t rows, int64_t slots);

absl::StatusOr<BankPlan> PlanBanks(const std::vector<select::Selection>& selections,
                                   Prefetch prefetch, const BankConfig& bank,
                                   const AttentionShape& shape, int64_t rows);

}  // namespace carrel::decoder
