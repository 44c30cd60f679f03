// What:   rows that a reply brought, per token and KV head, and attention over the best of them
//         under the true query (CandidateRows); and rows that the store sent before, kept by the decoder (RowCache): a
//         bounded cache per layer and KV head. Queries name the rows held, and only the others travel
//         (retrieval.proto, held).
// Math:   scores exact: scale * <q[h], k[j]>; the group keeps the top_k rows with the largest group
//         score (kernels/score/group_score), ties by smaller id; attention over those. With top_k >= rows
//         it is attention over all of them.
//         Cache: kernels/rows/row_bank: least recently used first, one use per token and KV head, of the rows
//         that its reply selected. Layers that attend to every row stream them and hold none here.
// Source: docs/decisions/022.
// Edge:   a reply that selects more rows than a head has slots (range, mass) is attended and not
//         kept. Of several tokens in one reply, a row that an earlier one pushed out is not kept
//         again: its bytes are gone.
// Errors: DataLoss a reply that does not hold together: other rows than ids, ids outside the zone or
//         twice, a head without rows. InvalidArgument of Slots: fewer bytes than the rows of one query need.
// Ownership: a reply's rows are read where they came: its parts are kept.
// Threads: one.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/config.h"
#include "decoder/statistics.h"
#include "decoder/window/partial.h"
#include "kernels/rows/row_bank/row_bank.h"
#include "retrieval/session.h"

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

class CandidateRows {
 public:
  // A whole reply: every token and head has rows, none of them twice. held: of want = ROWS, which brings ids,
  // K and V; of rows that it has for the layer, K and V are there, unless the store sent all. Null: ids only.
  static absl::StatusOr<CandidateRows> Of(std::vector<retrieval::Part> parts,
                                          const AttentionShape& shape, RowRange zone,
                                          int64_t tokens, const RowCache* held = nullptr,
                                          Layer layer = Layer(0));

  const std::vector<Position>& ids(int64_t token, KvHead head) const {
    return rows_[static_cast<size_t>(token * shape_.kv_heads + head.value())].ids;
  }
  // [tokens, q_heads], as a query that measures mass brings it; DataLoss it did not.
  absl::StatusOr<std::vector<float>> ZoneLse() const;
  // After the last use of K and V: the cache keeps them, and counts.
  void KeepIn(RowCache& cache, Layer layer, BankStatistics& statistics) const;

  // Refines every token and head and merges the attention into partial; returns the rows attended.
  // Group scores are over the zone as far as the store said what its other rows weigh.
  // top_k: of a KV head.
  int64_t Attend(const float* q, absl::FunctionRef<int64_t(KvHead)> top_k, ThreadPool* pool,
                 Partial& partial) const;

 private:
  struct Rows {
    std::vector<Position> ids;
    std::vector<const void*> k, v;
    int64_t held = 0;                                  // of them, in the row cache
    const float *rest = nullptr, *zone_lse = nullptr;  // the piece's, if they came
  };
  CandidateRows(const AttentionShape& shape, RowRange zone, int64_t tokens)
      : shape_(shape), zone_(zone), tokens_(tokens), rows_(tokens * shape.kv_heads) {}
  absl::Status Add(const retrieval::Piece& piece, const RowCache* held, Layer layer);
  absl::Status AddRows(const retrieval::Piece& piece, const RowCache& held, Layer layer,
                       Rows& to) const;
  absl::Status CheckComplete() const;

  AttentionShape shape_;
  RowRange zone_;
  int64_t tokens_;
  std::vector<Rows> rows_;  // [tokens, kv_heads]
  std::vector<retrieval::Part> parts_;
};

// Whether a piece of a reply is of the tokens and heads that were asked for.
absl::Status CheckPiece(const retrieval::Piece& piece, int64_t tokens, const AttentionShape& shape);

// Share of `wanted` that is among `found`, over both as sets.
double ShareFound(const std::vector<Position>& wanted, const std::vector<Position>& found);

}  // namespace carrel::decoder
