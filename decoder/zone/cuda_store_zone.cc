// What:      the zone at the store, for a GPU that runs the model: queries leave through pinned memory,
//            and the answer comes back through it (store_zone.cc).
// Ownership: as OpenedContext.
// Threads:   one.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "common/cuda/buffer.h"
#include "common/cuda/range.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/zone/cuda_zone_attention.h"
#include "decoder/zone/make_zone.h"

namespace carrel::decoder {
namespace {

class CudaStoreZone final : public CudaZoneAttention {
 public:
  // zone: the store's, for a CPU.
  CudaStoreZone(const OpenedContext& context, std::unique_ptr<ZoneAttention> zone)
      : CudaZoneAttention(context), at_store_(std::move(zone)) {}

  absl::Status Load(int64_t block, const cuda::Stream&) override {
    const int64_t floats = block * width_, heads = block * shape_.q_heads;
    ASSIGN_OR_RETURN(q_, cuda::PinnedBuffer<float>::Create(floats));
    ASSIGN_OR_RETURN(predicted_q_, cuda::PinnedBuffer<float>::Create(floats));
    ASSIGN_OR_RETURN(lse_, cuda::PinnedBuffer<float>::Create(heads));
    ASSIGN_OR_RETURN(answer_, cuda::PinnedBuffer<float>::Create(floats + heads));
    // The zone is the empty set until the store has answered.
    std::fill_n(answer_.data(), floats, 0.0f);
    std::fill_n(answer_.data() + floats, heads, -INFINITY);
    return absl::OkStatus();
  }

  bool asks_host() const override { return true; }
  int64_t predicted_tokens(int64_t block) const override { return prefetches_ ? block : 0; }
  bool predicts(Layer, int64_t) const override { return prefetches_; }

  absl::Status TakeQueries(Layer, const CudaQueries& queries, const cuda::Stream& stream) override {
    return Copy(q_.data(), queries.exact, queries.n * width_, stream);
  }

  absl::Status Predict(Layer, const CudaQueries& queries, const cuda::Stream& stream) override {
    return Copy(predicted_q_.data(), queries.exact, queries.n * width_, stream);
  }

  absl::Status TakeWindow(Layer, const float* lse, int64_t n, const cuda::Stream& stream) override {
    if (!measures_) return absl::OkStatus();
    return Copy(lse_.data(), lse, n * shape_.q_heads, stream);
  }

  absl::Status Attend(Layer, const CudaQueries& queries, int64_t, const CudaPartial& to,
                      const cuda::Stream& stream) override {
    const int64_t floats = queries.n * width_;
    RETURN_IF_ERROR(Copy(to.out, answer_.data(), floats, stream));
    return Copy(to.lse, answer_.data() + floats, queries.n * shape_.q_heads, stream);
  }

  absl::Status Ask(Layer layer, int64_t n) override {
    RETURN_IF_ERROR(at_store_->Start(layer, q_.data(), n));
    if (prefetches_ && layer.next().value() < shape_.layers)
      RETURN_IF_ERROR(at_store_->Prefetch(layer.next(), predicted_q_.data(), n));
    return absl::OkStatus();
  }

  absl::Status Answer(Layer layer, int64_t n, const cuda::Stream& stream) override {
    const cuda::Range range("store");
    RETURN_IF_ERROR(at_store_->Finish(layer, q_.data(), n, partial_));
    if (measures_) {
      RETURN_IF_ERROR(stream.Synchronize());
      window_.lse.assign(lse_.data(), lse_.data() + n * shape_.q_heads);
    }
    RETURN_IF_ERROR(at_store_->Measure(layer, q_.data(), n, partial_, window_));
    std::copy(partial_.out.begin(), partial_.out.end(), answer_.data());
    std::copy(partial_.lse.begin(), partial_.lse.end(), answer_.data() + partial_.out.size());
    return absl::OkStatus();
  }

  void set_reading_prompt(bool reading) override { at_store_->set_reading_prompt(reading); }
  void Cancel() override { at_store_->Cancel(); }
  void Count(int64_t) override {}  // at_store_ did
  std::vector<LayerStatistics> statistics() const override { return at_store_->statistics(); }

 private:
  absl::Status Copy(float* to, const float* from, int64_t count, const cuda::Stream& stream) const {
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(float),
                                         cudaMemcpyDefault, stream.get()));
    return absl::OkStatus();
  }

  const int64_t width_ =
      int64_t{shape_.q_heads} * shape_.head_dim;  // elements of a token's q heads
  const bool prefetches_ = config_.prefetch != Prefetch::kOff;
  const bool measures_ = config_.measure;
  const std::unique_ptr<ZoneAttention> at_store_;
  Partial partial_, window_;  // of the window lse alone
  cuda::PinnedBuffer<float> q_, predicted_q_, lse_;
  cuda::PinnedBuffer<float> answer_;  // [n, q_heads, head_dim] out, then [n, q_heads] lse
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaZoneAttention>> MakeCudaStoreZone(const OpenedContext& context) {
  ASSIGN_OR_RETURN(std::unique_ptr<ZoneAttention> zone, MakeStoreZone(context));
  return std::make_unique<CudaStoreZone>(context, std::move(zone));
}

}  // namespace carrel::decoder
