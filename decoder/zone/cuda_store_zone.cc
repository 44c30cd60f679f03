#include "decoder/zone/cuda_store_zone.h"

#include <algorithm>
#include <cmath>

#include "common/cuda/range.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/zone/make_zone.h"

namespace carrel::decoder {

absl::Status CudaStoreZone::Load(int64_t block, const cuda::Stream&) {
  const int64_t floats = block * width_, heads = block * shape_.q_heads;
  ASSIGN_OR_RETURN(q_, cuda::PinnedBuffer<float>::Create(floats));
  ASSIGN_OR_RETURN(predicted_q_, cuda::PinnedBuffer<float>::Create(floats));
  ASSIGN_OR_RETURN(lse_, cuda::PinnedBuffer<float>::Create(heads));
  ASSIGN_OR_RETURN(answer_, cuda::PinnedBuffer<float>::Create(floats + heads));
  ASSIGN_OR_RETURN(queries_ready_, cuda::Event::Create());
  // The zone is the empty set until the store has answered.
  std::fill_n(answer_.data(), floats, 0.0f);
  std::fill_n(answer_.data() + floats, heads, -INFINITY);
  return absl::OkStatus();
}

absl::Status CudaStoreZone::Copy(float* to, const float* from, int64_t count,
                                 const cuda::Stream& stream) const {
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(float),
                                       cudaMemcpyDefault, stream.get()));
  return absl::OkStatus();
}

absl::Status CudaStoreZone::TakeQueries(Layer, const CudaQueries& queries,
                                        const cuda::Stream& stream) {
  return Copy(q_.data(), queries.exact, queries.n * width_, stream);
}

absl::Status CudaStoreZone::Predict(Layer, const CudaQueries& queries, const cuda::Stream& stream) {
  return Copy(predicted_q_.data(), queries.exact, queries.n * width_, stream);
}

absl::Status CudaStoreZone::TakeWindow(Layer, const float* lse, int64_t n,
                                       const cuda::Stream& stream) {
  if (!measures_) return absl::OkStatus();
  return Copy(lse_.data(), lse, n * shape_.q_heads, stream);
}

absl::Status CudaStoreZone::QueriesEnqueued(const cuda::Stream& stream) {
  return queries_ready_.Record(stream);
}

absl::Status CudaStoreZone::Ask(Layer layer, int64_t n) {
  RETURN_IF_ERROR(queries_ready_.Synchronize());
  RETURN_IF_ERROR(zone_.Start(layer, q_.data(), n));
  if (prefetches_ && layer.next().value() < shape_.layers)
    RETURN_IF_ERROR(zone_.Prefetch(layer.next(), predicted_q_.data(), n));
  return absl::OkStatus();
}

absl::Status CudaStoreZone::Answer(Layer layer, int64_t n, const cuda::Stream& stream) {
  const cuda::Range range("store");
  RETURN_IF_ERROR(zone_.Finish(layer, q_.data(), n, partial_));
  if (measures_) {
    RETURN_IF_ERROR(stream.Synchronize());
    window_.lse.assign(lse_.data(), lse_.data() + n * shape_.q_heads);
  }
  RETURN_IF_ERROR(zone_.Measure(layer, q_.data(), n, partial_, window_));
  std::copy(partial_.out.begin(), partial_.out.end(), answer_.data());
  std::copy(partial_.lse.begin(), partial_.lse.end(), answer_.data() + partial_.out.size());
  return absl::OkStatus();
}

absl::Status CudaStoreZone::Attend(Layer, const CudaQueries& queries, int64_t,
                                   const CudaPartial& to, const cuda::Stream& stream) {
  const int64_t floats = queries.n * width_;
  RETURN_IF_ERROR(Copy(to.out, answer_.data(), floats, stream));
  return Copy(to.lse, answer_.data() + floats, queries.n * shape_.q_heads, stream);
}

absl::StatusOr<std::unique_ptr<CudaZoneAttention>> MakeCudaStoreZone(const OpenedContext& context) {
  return std::make_unique<CudaStoreZone>(context);
}

}  // namespace carrel::decoder
