// What:   reads rows from the store in order, a few requests ahead: a range of a layer (dense layers under want = ROWS),
//         or ranges of every layer, several requests ahead: the window at open, and the zone if it is to be held here.
// Errors: those of the store; DataLoss a reply that does not continue where the last one ended.
// Ownership: the client outlives it.
// Cost:   at most kRequestsAhead * Limits.max_fetch_rows rows are held.
#pragma once

#include <cstdint>
#include <deque>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "retrieval/session.h"

namespace carrel::decoder {

class RowStream {
 public:
  static constexpr int kRequestsAhead = 2;

  // max_fetch_rows: of one request, over its heads (Limits).
  RowStream(retrieval::Session* client, const AttentionShape& shape, Layer layer, RowRange range,
            int64_t max_fetch_rows);

  // Sends the first requests; they are in flight from now on.
  absl::Status Start();

  // Hands over blocks (kv_head, first position, rows, k, v: [rows, head_dim] bf16 unaligned), per
  // head in order, until the range is done. waited_us and bytes grow by what this took and brought.
  using Sink = absl::FunctionRef<void(KvHead, Position, int64_t, const void*, const void*)>;
  absl::Status Drain(Sink sink, double* waited_us, int64_t* bytes);

  // Gives up what is in flight.
  void Cancel();

 private:
  struct Request {
    retrieval::RequestId id;
    RowRange range;
  };
  absl::Status SendNext();
  absl::Status DrainOne(const Request& request, Sink sink, double* waited_us, int64_t* bytes);

  retrieval::Session* const client_;
  const AttentionShape shape_;
  const Layer layer_;
  const RowRange range_;
  const int64_t rows_per_request_;
  Position next_;
  std::deque<Request> in_flight_;
};

// A block of rows of one head: [rows, head_dim] bf16, unaligned, from position `first` on. In order
// of layers, then ranges, then heads, then positions.
struct ContextRows {
  Layer layer;
  KvHead head;
  Position first = 0;
  int64_t rows = 0;
  const void* k = nullptr;
  const void* v = nullptr;
};

// ranges: of each layer; what it returns stays valid until the next call.
absl::Status ReadContextRows(retrieval::Session* client, const AttentionShape& shape,
                             absl::FunctionRef<absl::Span<const RowRange>(Layer)> ranges,
                             int64_t max_fetch_rows,
                             absl::FunctionRef<absl::Status(const ContextRows&)> take);

}  // namespace carrel::decoder
