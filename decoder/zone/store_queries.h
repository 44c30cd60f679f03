// What:      the queries of one sequence to a store, and their replies: what the zone attends to
//            (store_zone.h) and what measures it (retrieval_meter.h) ask by the same words.
// Errors:    those of the store; DataLoss a reply that was not asked for.
// Ownership: the context outlives it.
// Threads:   one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "decoder/statistics.h"
#include "decoder/window/partial.h"
#include "decoder/zone/opened_context.h"
#include "retrieval/session.h"

namespace carrel::decoder {

class StoreQueries {
 public:
  explicit StoreQueries(const OpenedContext* context);

  const OpenedContext& context() const { return context_; }
  const AttentionShape& shape() const { return context_.shape; }
  RowRange zone() const { return context_.zone; }
  // Whether rows that are not selected count through their clusters' summaries.
  bool estimates() const { return estimate_; }
  const select::Selection& selection(Layer layer) const {
    return context_.selections[static_cast<size_t>(layer.value())];
  }
  // Whether tokens of a prompt attend to every row.
  bool prompt_takes_all() const { return prompt_takes_all_; }
  bool all_rows(Layer layer) const { return select::IsAll(selection(layer)); }
  retrieval::Session* client() const { return context_.client; }

  // Queries with one key are the same of the same numbers, over the same content, and nothing of their
  // replies is kept or measured; empty: there are none like these.
  std::string batch_key() const;

  // What the layer attends to, for q [n, q_heads, head_dim].
  retrieval::Query Make(Layer layer, const float* q, int64_t n) const;
  // Asks the same, or all rows, of a client that attends(), and waits.
  absl::Status Attend(Layer layer, const float* q, int64_t n, bool all, Partial& partial,
                      LayerStatistics& statistics) const;
  // Attention over every row.
  retrieval::Query MakeDense(Layer layer, const float* q, int64_t n) const;
  // Candidates for predicted queries, and how many rows they are.
  retrieval::Query MakeAhead(Layer layer, const float* predicted_q, int64_t n) const;
  int64_t RowsAhead(Layer layer) const;

  // All parts of a reply; counts wait and bytes where statistics are given.
  absl::StatusOr<std::vector<retrieval::Part>> Receive(retrieval::RequestId id,
                                                       LayerStatistics* statistics) const;
  // partial [n, q_heads].
  absl::Status MergeAttend(const retrieval::Part& part, int64_t n, Partial& partial) const;
  // Whether a piece was asked for.
  absl::Status CheckPiece(const retrieval::Piece& piece, int64_t n) const;

 private:
  const OpenedContext& context_;
  const bool estimate_, scan_, prompt_takes_all_;
};

}  // namespace carrel::decoder
