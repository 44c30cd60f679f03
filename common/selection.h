// What:   which rows of the zone a KV head attends to, as one word: what a decoder asks and the wire says
//         is what an engine does.
// Math:   TopK: the rows with the largest group scores. Range: rows whose score is at most `below` under
//         the best of a q head. Mass: the best rows until every q head of the group has this share of its
//         softmax over the zone, as estimated.
// Errors: ValidateSelection: InvalidArgument a number outside its bounds, named as the wire names it.
// Threads: any.
#pragma once

#include <cstdint>
#include <limits>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "common/ids.h"

namespace carrel::select {

struct TopK {
  int64_t rows = 0;
  std::vector<int64_t> of_head = {};  // [kv_heads], each 1 .. rows; empty: rows of each
  int64_t Of(KvHead head) const {
    return of_head.empty() ? rows : of_head[static_cast<size_t>(head.value())];
  }
  bool operator==(const TopK&) const = default;
};
struct All {
  bool operator==(const All&) const = default;
};
struct Range {
  float below = 0;
  int64_t max_rows = 0;  // of a KV head; 0: what the engine allows
  bool operator==(const Range&) const = default;
};
struct Mass {
  float share = 0;
  int64_t max_rows = 0;  // as Range
  bool operator==(const Mass&) const = default;
};
using Selection = std::variant<TopK, All, Range, Mass>;

inline bool IsAll(const Selection& selection) { return std::holds_alternative<All>(selection); }

// Of each KV head at most, of TopK; 0 for others.
inline int64_t TopKRows(const Selection& selection) {
  const auto* top_k = std::get_if<TopK>(&selection);
  return top_k == nullptr ? 0 : top_k->rows;
}

// Whether every row of a zone of so many is taken, whatever the scores.
inline bool Covers(const Selection& selection, int64_t zone_rows) {
  if (const auto* top_k = std::get_if<TopK>(&selection))
    return top_k->of_head.empty() && top_k->rows >= zone_rows;
  return IsAll(selection);
}

// Of Range and Mass; null for others.
inline int64_t* MaxRows(Selection& selection) {
  if (auto* range = std::get_if<Range>(&selection)) return &range->max_rows;
  if (auto* mass = std::get_if<Mass>(&selection)) return &mass->max_rows;
  return nullptr;
}

// The most rows of a KV head that a selection can be of a zone of so many. allowed: what 0 stands for in
// Range and Mass.
int64_t MostRows(const Selection& selection, int64_t zone_rows,
                 int64_t allowed = std::numeric_limits<int64_t>::max());

struct SelectionBounds {
  int64_t max_top_k = std::numeric_limits<int64_t>::max();  // the engine's
  int64_t tokens = std::numeric_limits<int64_t>::max();     // of the context
  int64_t kv_heads = 0;                                     // of the context; 0: not known
};
absl::Status ValidateSelection(const Selection& selection, const SelectionBounds& bounds);

}  // namespace carrel::select
