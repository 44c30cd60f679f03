// What:   strong types for the numbers that must not be swapped, and the shape of a model's
//         attention.
// Units:  all are indices counted from 0.
#pragma once

#include <compare>
#include <cstdint>
#include <ostream>

namespace carrel {

template <typename Tag, typename Rep>
class StrongIndex {
 public:
  using rep = Rep;
  constexpr StrongIndex() = default;
  constexpr explicit StrongIndex(Rep value) : value_(value) {}
  constexpr Rep value() const { return value_; }
  constexpr auto operator<=>(const StrongIndex&) const = default;
  constexpr StrongIndex next() const { return StrongIndex(value_ + 1); }
  friend std::ostream& operator<<(std::ostream& os, StrongIndex i) { return os << i.value_; }
  template <typename H>
  friend H AbslHashValue(H h, StrongIndex i) {
    return H::combine(std::move(h), i.value_);
  }

 private:
  Rep value_ = 0;
};

using Layer = StrongIndex<struct LayerTag, int32_t>;
using KvHead = StrongIndex<struct KvHeadTag, int32_t>;
using QHead = StrongIndex<struct QHeadTag, int32_t>;

using TokenId = int32_t;   // an entry of the vocabulary
using Position = int64_t;  // index of a token in the sequence; rows of K and V are numbered by it

struct AttentionShape {
  int32_t layers = 0;
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t group() const { return q_heads / kv_heads; }  // q heads that share a KV head
  bool operator==(const AttentionShape&) const = default;
};

// Rows [begin, end).
struct RowRange {
  Position begin = 0;
  Position end = 0;
  int64_t rows() const { return end - begin; }
  bool operator==(const RowRange&) const = default;
};

}  // namespace carrel
