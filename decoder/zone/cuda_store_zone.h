// What:      the zone at the store, for a GPU that runs the model: queries leave through pinned memory,
//            and the answer comes back through it (store_zone.h).
// Ownership: as StoreZone.
// Threads:   one.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"
#include "decoder/zone/cuda_zone_attention.h"
#include "decoder/zone/opened_context.h"
#include "decoder/zone/store_zone.h"

namespace carrel::decoder {

class CudaStoreZone final : public CudaZoneAttention {
 public:
  explicit CudaStoreZone(const OpenedContext& context)
      : CudaZoneAttention(context), zone_(context) {}

  absl::Status Load(int64_t block, const cuda::Stream& stream) override;
  bool asks_host() const override { return true; }
  int64_t predicted_tokens(int64_t block) const override { return prefetches_ ? block : 0; }
  bool predicts(Layer, int64_t) const override { return prefetches_; }

  absl::Status TakeQueries(Layer layer, const CudaQueries& queries,
                           const cuda::Stream& stream) override;
  absl::Status Predict(Layer next, const CudaQueries& queries, const cuda::Stream& stream) override;
  absl::Status TakeWindow(Layer layer, const float* lse, int64_t n,
                          const cuda::Stream& stream) override;
  absl::Status Attend(Layer layer, const CudaQueries& queries, int64_t phase, const CudaPartial& to,
                      const cuda::Stream& stream) override;

  absl::Status QueriesEnqueued(const cuda::Stream& stream) override;
  absl::Status Ask(Layer layer, int64_t n) override;
  absl::Status Answer(Layer layer, int64_t n, const cuda::Stream& stream) override;
  void set_reading_prompt(bool reading) override { zone_.set_reading_prompt(reading); }
  void Cancel() override { zone_.Cancel(); }
  void Count(int64_t) override {}  // zone_ did
  std::vector<LayerStatistics> statistics() const override { return zone_.statistics(); }

 private:
  absl::Status Copy(float* to, const float* from, int64_t count, const cuda::Stream& stream) const;

  const AttentionShape& shape_ = context_.shape;
  const int64_t width_ =
      int64_t{shape_.q_heads} * shape_.head_dim;  // elements of a token's q heads
  const bool prefetches_ = context_.config.prefetch != Prefetch::kOff;
  const bool measures_ = context_.config.measure;
  StoreZone zone_;
  Partial partial_, window_;  // of the window lse alone
  cuda::Event queries_ready_;
  cuda::PinnedBuffer<float> q_, predicted_q_, lse_;
  cuda::PinnedBuffer<float> answer_;  // [n, q_heads, head_dim] out, then [n, q_heads] lse
};

}  // namespace carrel::decoder
