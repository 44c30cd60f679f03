// What:      the zone held on the GPU: its rows and their binary codes, searched and attended
//            there.
// Math:      dense layers: attention over every row. Others: the rows whose codes agree most with
//            those of the group's queries (kernels/hamming_score), oversample * top_k of them, are
//            attended; none is re-ranked.
// Source:    HATA (2025), with random directions instead of learned ones.
// Shapes:    of each layer k, v [kv_heads, rows, head_dim] bf16, codes [kv_heads, rows, 128 bits].
// Errors:    ResourceExhausted device memory; those of the store while it is filled.
// Threads:   one. Attend only enqueues and can be captured.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"
#include "common/ids.h"
#include "decoder/config.h"
#include "decoder/cuda_window.h"

namespace carrel::decoder {

class StoreClient;

class CudaZone {
 public:
  static int64_t Bytes(const AttentionShape& shape, int64_t rows);
  // Reads the zone from the store.
  static absl::StatusOr<CudaZone> Create(const RetrievalConfig& config, const AttentionShape& shape,
                                         RowRange zone, int64_t max_fetch_rows, StoreClient* client,
                                         const cuda::Stream& stream);
  CudaZone() = default;

  // One token: q [q_heads, head_dim] bf16 -> out [q_heads, head_dim], lse [q_heads] f32.
  absl::Status Attend(Layer layer, const uint16_t* q, float* out, float* lse,
                      const cuda::Stream& stream) const;

  // Rows that a token attends to in each KV head.
  int64_t attended(Layer layer) const { return attended_[static_cast<size_t>(layer.value())]; }

 private:
  absl::Status Encode(const cuda::Stream& stream);

  AttentionShape shape_;
  int64_t rows_ = 0;
  float scale_ = 0;
  std::vector<int64_t> attended_;
  int64_t splits_ = 0;
  CudaWindow values_;  // the zone's rows
  cuda::DeviceBuffer<uint16_t> directions_;
  cuda::DeviceBuffer<uint32_t> codes_, query_codes_;
  cuda::DeviceBuffer<int32_t> ids_;
  cuda::DeviceBuffer<uint8_t> attention_workspace_, selection_workspace_;
};

}  // namespace carrel::decoder
