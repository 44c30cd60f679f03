// What:   reads ranges of rows of every layer from the store, several requests ahead: the window at
//         open, and the zone if it is to be held here.
// Errors: those of RowStream.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "decoder/client/row_stream.h"

namespace carrel::decoder {

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

absl::Status ReadContextRows(retrieval::Session* client, const AttentionShape& shape,
                             absl::Span<const RowRange> ranges, int64_t max_fetch_rows,
                             absl::FunctionRef<absl::Status(const ContextRows&)> take);
// The same with ranges of each layer's own; what `ranges` returns stays valid until the next call.
absl::Status ReadContextRows(retrieval::Session* client, const AttentionShape& shape,
                             absl::FunctionRef<absl::Span<const RowRange>(Layer)> ranges,
                             int64_t max_fetch_rows,
                             absl::FunctionRef<absl::Status(const ContextRows&)> take);

}  // namespace carrel::decoder
