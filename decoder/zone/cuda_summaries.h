// What:   the estimation term of a zone that a GPU attends to: summaries of every layer that is not
//         dense, in device memory, and attention to them (kernels/attention/summary_attention).
// Shapes: as kernels/attention/summary_attention/summary_attention_cuda.h, of each layer.
// Errors: DataLoss damaged summaries.
// Ownership: keeps nothing of the host's; its memory is that of the arena.
// Threads: one.
// Cost:   2 head_dim + 16 bytes per cluster, and a byte per row, of each KV head.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/cuda/arena.h"
#include "common/cuda/stream.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/select/host_rows.h"
#include "kernels/attention/summary_attention/summary_attention_cuda.h"
#include "kernels/kv_view.h"

namespace carrel::decoder {

class CudaSummaries {
 public:
  CudaSummaries() = default;
  // rows.has_summaries(); the zone is not empty.
  CudaSummaries(const CudaZoneShape& shape, const HostRows& rows, cuda::DeviceArena& arena);
  absl::Status Load(const HostRows& rows, ThreadPool* pool) const;

  // Whether there are any.
  bool empty() const { return layers_.empty(); }

  // Where the selected rows lie.
  struct SelectedRows {
    kernels::KvView kv;
    const int32_t* places = nullptr;  // [kv_heads, places_stride]; null: at their ids
    int64_t places_stride = 0;
    bool gathered = false;  // instead: in the order of the selection
  };
  // What was not selected joins (out [q_heads, head_dim], lse [q_heads]) of attention to what was.
  kernels::SummaryAttentionCudaParams ToRest(Layer layer, const uint16_t* q,
                                             const CudaSelection& selection,
                                             const SelectedRows& selected, float* out,
                                             float* lse) const;

 private:
  struct LayerTable {
    int8_t *keys = nullptr, *values = nullptr;
    kernels::SummaryTable::Cluster* clusters = nullptr;
    uint8_t* row_cluster = nullptr;
    float* centre = nullptr;
  };
  absl::Status Upload(Layer layer, const HostRows& rows, ThreadPool* pool) const;

  CudaZoneShape shape_;
  kernels::SummarySegments segments_;
  int64_t clusters_ = 0;  // of each KV head
  std::vector<LayerTable> layers_;
  uint8_t* workspace_ = nullptr;
};

}  // namespace carrel::decoder
