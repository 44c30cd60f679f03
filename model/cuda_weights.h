// What:      a checkpoint's weights in device memory: bf16 or f16 matrices, fp32 vectors.
// Shapes:    row-major as in the checkpoint. q, k and v stand below each other in one matrix, so do
//            gate and up: one product each.
// Math:      matrices that are all f16 stay f16; else f32 and f16 are rounded to bf16. Blocks of a
//            GGUF file are widened in host memory first, and rounded to bf16. What an adapter adds
//            is summed in float with the weight, and rounded once.
// Errors:    ResourceExhausted device memory; what CUDA says.
// Ownership: one allocation; the mapped checkpoint is not needed after Load. Shared: all who ask for the
//            same checkpoint on the same device hold the same, which goes with the last of them.
// Threads:   immutable; Shared: any. Who asks for what is being loaded waits for it.
// Cost:      Load reads every weight once, through pinned memory; the pool shares the copying.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/buffer.h"
#include "common/thread_pool.h"
#include "kernels/half_type.h"
#include "model/config.h"
#include "model/device.h"

namespace carrel::model {

class Weights;
class Adapter;  // adapter.h

struct CudaMatrix {
  const void* w = nullptr;      // [out, in], of type()
  const float* bias = nullptr;  // [out] or null
  int64_t out = 0;
  int64_t in = 0;
};

struct CudaLayerWeights {
  CudaMatrix qkv, o, gate_up, down;
  const float* attention_norm = nullptr;
  const float* mlp_norm = nullptr;
  const float* q_norm = nullptr;  // null without qk_norm
  const float* k_norm = nullptr;
};

class CudaWeights {
 public:
  // Device bytes of a model, known from its config alone.
  static int64_t Bytes(const ModelConfig& config);
  // Loaded if nobody holds them. The adapter may be null.
  static absl::StatusOr<std::shared_ptr<const CudaWeights>> Shared(
      const ModelConfig& config, const std::shared_ptr<const Weights>& weights, ThreadPool* pool,
      const std::shared_ptr<const Adapter>& adapter);
  // What Shared would take now: Bytes, or nothing.
  static int64_t SharedBytes(const ModelConfig& config,
                             const std::shared_ptr<const Weights>& weights,
                             const std::shared_ptr<const Adapter>& adapter);
  static absl::StatusOr<CudaWeights> Load(const ModelConfig& config, const Weights& weights,
                                          ThreadPool* pool, const Adapter* adapter = nullptr);

  kernels::HalfType type() const { return type_; }      // of all matrices
  const void* embedding() const { return embedding_; }  // [vocab, hidden]
  const CudaMatrix& head() const { return head_; }
  const CudaLayerWeights& layer(Layer layer) const { return layers_[layer.value()]; }
  const float* final_norm() const { return final_norm_; }
  const float* inv_freq() const { return inv_freq_; }

 private:
  friend class CudaWeightsLoader;
  CudaWeights() = default;

  cuda::DeviceBuffer<uint8_t> memory_;
  GpuReservation reserved_;
  kernels::HalfType type_ = kernels::HalfType::kBf16;
  const void* embedding_ = nullptr;
  CudaMatrix head_;
  std::vector<CudaLayerWeights> layers_;
  const float* final_norm_ = nullptr;
  const float* inv_freq_ = nullptr;
};

}  // namespace carrel::model
