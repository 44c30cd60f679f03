// What:   rows that the store sent before, kept by the decoder: a bounded cache per layer and KV
//         head. Queries name the rows held, and only the others travel (retrieval.proto, held).
// Math:   kernels/rows/row_bank: least recently used first, one use per token and KV head, of the rows
//         that its reply selected. Layers that attend to every row stream them and hold none here.
// Source: docs/decisions/022.
// Edge:   a reply that selects more rows than a head has slots (range, mass) is attended and not
//         kept. Of several tokens in one reply, a row that an earlier one pushed out is not kept
//         again: its bytes are gone.
// Errors: InvalidArgument of Slots: fewer bytes than the rows of one query need.
// Threads: one.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "decoder/config.h"
#include "decoder/statistics.h"
#include "kernels/rows/row_bank/row_bank.h"

namespace carrel::decoder {

class RowCache {
 public:
  // Slots per KV head of each layer for config.row_cache_bytes; 0: nothing is kept.
  static absl::StatusOr<std::vector<int64_t>> Slots(
      const RetrievalConfig& config, const AttentionShape& shape,
      const std::vector<select::Selection>& selections, int64_t zone_rows);
  // slots: as Slots gave them.
  RowCache(const AttentionShape& shape, const std::vector<int64_t>& slots);

  bool keeps(Layer layer) const { return slots_[static_cast<size_t>(layer.value())] > 0; }
  // The rows held, for a query to name (Query::held). Until its reply is here nothing of the layer may be kept.
  std::vector<std::vector<Position>> Held(Layer layer) const;
  // K of a row, V right after it; null if it is not held.
  const char* Find(Layer layer, KvHead head, Position id) const;
  // Rows of one token and head, from a reply or from here.
  void Keep(Layer layer, KvHead head, absl::Span<const Position> ids,
            absl::Span<const void* const> k, absl::Span<const void* const> v);

  int64_t slots(Layer layer) const { return slots_[static_cast<size_t>(layer.value())]; }

 private:
  struct Head {
    kernels::RowBank bank;
    std::vector<int32_t> row_in;  // of each slot, -1: none
    std::vector<uint64_t> held;   // a bit per position
    std::vector<char> rows;       // [slots]: K, then V
  };
  size_t Index(Layer layer, KvHead head) const {
    return static_cast<size_t>(int64_t{layer.value()} * shape_.kv_heads + head.value());
  }

  const AttentionShape shape_;
  const int64_t row_bytes_;  // of K, and of V
  const std::vector<int64_t> slots_;
  std::vector<Head> heads_;  // [layers, kv_heads]
};

}  // namespace carrel::decoder
