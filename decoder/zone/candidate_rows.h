// What:   rows that a reply brought, per token and KV head, and attention over the best of them
//         under the true query.
// Math:   scores exact: scale * <q[h], k[j]>; the group keeps the top_k rows with the largest group
//         score (kernels/score/group_score), ties by smaller id; attention over those. With top_k >= rows
//         it is attention over all of them.
// Errors: DataLoss a reply that does not hold together: other rows than ids, ids outside the zone or
//         twice, a head without rows.
// Ownership: keeps the reply's parts; rows are read where they came.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/statistics.h"
#include "decoder/window/partial.h"
#include "decoder/zone/row_cache.h"
#include "retrieval/session.h"

namespace carrel::decoder {

class CandidateRows {
 public:
  // A whole reply: every token and head has rows, none of them twice. held: of want = ROWS, which brings ids,
  // K and V; of rows that it has for the layer, K and V are there, unless the store sent all. Null: ids only.
  static absl::StatusOr<CandidateRows> Of(std::vector<retrieval::Part> parts,
                                          const AttentionShape& shape, RowRange zone,
                                          int64_t tokens, const RowCache* held = nullptr,
                                          Layer layer = Layer(0));

  const std::vector<Position>& ids(int64_t token, KvHead head) const { return At(token, head).ids; }
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
    int64_t held = 0;             // of them, in the row cache
    const float* rest = nullptr;  // Piece::rest, if it came
  };
  CandidateRows(const AttentionShape& shape, RowRange zone, int64_t tokens);
  absl::Status Add(const retrieval::Piece& piece, const RowCache* held, Layer layer);
  absl::Status AddRows(const retrieval::Piece& piece, const RowCache& held, Layer layer,
                       Rows& to) const;
  absl::Status CheckComplete() const;
  const Rows& At(int64_t token, KvHead head) const {
    return rows_[static_cast<size_t>(token * shape_.kv_heads + head.value())];
  }

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
