// What:   the methods that give every row of the zone a score, of which the best are taken, or
//         are candidates.
// Errors: those of CudaCandidates.
#pragma once

#include "common/cuda/buffer.h"
#include "decoder/select/cuda_candidates.h"
#include "decoder/select/cuda_row_selector.h"

namespace carrel::decoder {

class CudaScoreSelector : public CudaRowSelector {
 public:
  static int64_t Bytes(const CudaZoneShape& shape, int64_t oversample);

  absl::Status Select(Layer layer, const uint16_t* q, int64_t phase,
                      const cuda::Stream& stream) const final;
  bool attends(Layer layer) const final { return candidates_.rescores(layer); }
  absl::Status SelectAndAttend(Layer layer, const uint16_t* q, int64_t phase,
                               const CudaAttendSelected& attend,
                               const cuda::Stream& stream) const final;
  CudaSelection selection(Layer layer) const final;
  int64_t bytes() const override;

 protected:
  explicit CudaScoreSelector(const CudaZoneShape& shape) : shape_(shape) {}
  absl::Status Allocate(const char* method, int64_t oversample, const CudaKeys& keys);
  // scores [kv_heads, stride]: one for the q heads of a group.
  virtual absl::Status Score(Layer layer, const uint16_t* q, float* scores, int64_t stride,
                             const cuda::Stream& stream) const = 0;
  static int64_t Stride(const CudaZoneShape& shape);  // from one head's scores to the next's

  const CudaZoneShape shape_;

 private:
  absl::Status Choose(Layer layer, const uint16_t* q, const CudaAttendSelected* attend,
                      const cuda::Stream& stream) const;

  cuda::DeviceBuffer<float> scores_;  // [kv_heads, stride]
  cuda::DeviceBuffer<int32_t> ids_;   // [kv_heads, most of any layer], of the layer in turn
  CudaCandidates candidates_;
  cuda::DeviceBuffer<uint8_t> workspace_;
};

}  // namespace carrel::decoder
