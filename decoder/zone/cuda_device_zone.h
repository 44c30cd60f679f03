// What:      the zone held on the GPU: its rows, a method that chooses among them there, and their
//            attention.
// Math:      dense layers attend to every row, the others to those that the method chooses within
//            the layer's budget (decoder/select/cuda_row_selector.h), and with estimate=on to summaries
//            of the rest.
// Shapes:    of each layer k, v [kv_heads, rows, head_dim] bf16; of the method what it keeps.
// Errors:    ResourceExhausted device memory; those of the store while it is filled; those of
//            MakeCudaRowSelector.
// Threads:   one. Attend only enqueues and can be captured.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/config.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/window/cuda_window.h"
#include "decoder/zone/cuda_summaries.h"

namespace carrel::decoder {

class StoreClient;

class CudaDeviceZone {
 public:
  // host_rows here and below: where NeedsHostRows, or estimate=on: then it has summaries.
  static absl::StatusOr<int64_t> Bytes(const RetrievalConfig& config, const AttentionShape& shape,
                                       RowRange zone, const HostRows* host_rows);
  // Reads the zone from the store. config.selector is set; the zone is not empty.
  static absl::StatusOr<CudaDeviceZone> Create(const RetrievalConfig& config,
                                               const AttentionShape& shape, RowRange zone,
                                               int64_t max_fetch_rows, StoreClient* client,
                                               const HostRows* host_rows, ThreadPool* pool,
                                               const cuda::Stream& stream);
  CudaDeviceZone() = default;

  // One token: q [q_heads, head_dim] bf16 -> out [q_heads, head_dim], lse [q_heads] f32. phase: in
  // 0 .. phases() - 1, of the selector.
  absl::Status Attend(Layer layer, const uint16_t* q, int64_t phase, float* out, float* lse,
                      const cuda::Stream& stream) const;

  int64_t phases() const { return selector_ == nullptr ? 1 : selector_->phases(); }
  int64_t PhaseOf(int64_t step) const {
    return selector_ == nullptr ? 0 : selector_->PhaseOf(step);
  }

  // Rows that a token attends to, of all KV heads; where blocks or chunks at the zone's end are
  // short, at most.
  int64_t attended(Layer layer) const;

 private:
  absl::Status AttendChosen(Layer layer, const uint16_t* q, int64_t phase, float* out, float* lse,
                            const cuda::Stream& stream) const;

  CudaZoneShape shape_;
  float scale_ = 0;
  int64_t splits_ = 0;
  CudaWindow values_;                          // the zone's rows
  std::unique_ptr<CudaRowSelector> selector_;  // null: every layer is dense
  CudaSummaries summaries_;                    // of the estimation term; empty: there is none
  cuda::DeviceBuffer<uint8_t> workspace_;      // of attention
};

}  // namespace carrel::decoder
