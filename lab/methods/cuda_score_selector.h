// What:   the methods that give every row of the zone a score, of which the best are taken, or
//         are candidates.
// Errors: those of CudaCandidates.
// Ownership: its memory is that of the arena; the keys outlive it.
#pragma once

#include "common/cuda/arena.h"
#include "decoder/select/cuda_candidates.h"
#include "decoder/select/cuda_row_selector.h"

namespace carrel::decoder {

class CudaScoreSelector : public CudaRowSelector {
 public:
  absl::Status Load(const CudaSelectorInput&) override { return candidates_.Load(); }
  void Add(const CudaChoice& choice, CudaChoices& to) const final;
  absl::Status Enqueue(const CudaChoice& choice, const cuda::Stream& stream) const final;
  bool attends(Layer layer) const final { return candidates_.rescores(layer); }
  CudaSelection selection(Layer layer) const final;

 protected:
  explicit CudaScoreSelector(const CudaZoneShape& shape) : shape_(shape) {}
  absl::Status Lay(const char* method, int64_t oversample, const CudaKeys& keys,
                   cuda::DeviceArena& arena);
  // scores [kv_heads, stride]: one for the q heads of a group.
  virtual absl::Status Score(Layer layer, const uint16_t* q, float* scores, int64_t stride,
                             const cuda::Stream& stream) const = 0;
  static int64_t Stride(const CudaZoneShape& shape);  // from one head's scores to the next's

  const CudaZoneShape shape_;

 private:
  float* scores_ = nullptr;  // [kv_heads, stride]
  int32_t* ids_ = nullptr;   // [kv_heads, most of any layer], of the layer in turn
  CudaCandidates candidates_;
  uint8_t* workspace_ = nullptr;
};

}  // namespace carrel::decoder
