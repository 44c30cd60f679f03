// What:   the rows of a context that lie in this process's memory, and what its prefill left to
//         calibrate by. library/ fills it from a store in the same host (docs/decisions/020): the
//         decoder sees addresses and floats, never the store.
// Shapes: a row is head_dim bf16 at any byte address.
// Errors: of what methods are calibrated by: NotFound nothing of the kind is stored for a head;
//         DataLoss damaged bytes.
// Ownership: keeps the rows mapped.   Threads: any.
// Cost:   the rows were verified before it was made: the context was read once.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "kernels/attention/summary_attention/summary_table.h"
#include "retrieval/estimate.h"

namespace carrel::decoder {

// Rows of one layer and KV head, by position.
struct HeadView {
  std::vector<const char*> k_segments, v_segments;
  int64_t segment_rows = 1;
  int64_t row_bytes = 0;

  const void* Key(Position row) const { return At(k_segments, row); }
  const void* Value(Position row) const { return At(v_segments, row); }
  // How many rows from `row` on lie contiguously, up to `end`.
  int64_t Contiguous(Position row, Position end) const {
    const Position segment_end = (row / segment_rows + 1) * segment_rows;
    return (end < segment_end ? end : segment_end) - row;
  }

 private:
  const void* At(const std::vector<const char*>& segments, Position row) const {
    return segments[static_cast<size_t>(row / segment_rows)] + row % segment_rows * row_bytes;
  }
};

// Binary codes of every row of one head: bit i of row j is bit i % 32 of words[j, i / 32].
struct HeadCodes {
  int64_t bits = 0;
  std::vector<float> directions;  // [bits, head_dim]: a query's bit i is set if <q, it> > 0
  std::vector<float> decoder;     // [bits, head_dim]: key ~ centre + sum of +- decoder[i]
  std::vector<uint32_t> words;    // [tokens, bits / 32]
};

class HostRows {
 public:
  virtual ~HostRows() = default;
  // After the last use that counts: DataLoss if the rows changed on disk since they were mapped, or
  // cannot be read any more (names the file).
  virtual absl::Status CheckUnchanged() const { return absl::OkStatus(); }
  // Whether EstimateRest can be asked: the context has summaries.
  virtual bool has_summaries() const { return false; }
  virtual absl::Status EstimateRest(Layer, KvHead, const retrieval::EstimateRequest&) const {
    return absl::FailedPreconditionError("these rows have no summaries");
  }
  // The same for a GPU, of a zone that is not empty; has_summaries().
  virtual kernels::SummarySegments SummarySegmentsOf(RowRange) const { return {}; }
  virtual absl::StatusOr<kernels::SummaryTable> SummaryTableOf(Layer, KvHead, RowRange) const {
    return absl::FailedPreconditionError("these rows have no summaries");
  }
  virtual int64_t tokens() const = 0;
  virtual const HeadView& At(Layer layer, KvHead head) const = 0;
  // Queries of the document itself, as attention saw them: [samples, group, head_dim].
  virtual absl::StatusOr<std::vector<float>> SampledQueries(Layer layer, KvHead head) const = 0;
  virtual absl::StatusOr<HeadCodes> StoredCodes(Layer layer, KvHead head) const = 0;
};

}  // namespace carrel::decoder
