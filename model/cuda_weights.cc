#include "model/cuda_weights.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/cuda/pinned_ring.h"
#include "common/cuda/status.h"
#include "common/cuda/stream.h"
#include "common/dtype.h"
#include "common/status.h"
#include "model/weights.h"

namespace carrel::model {
namespace {

using kernels::HalfType;
using kernels::WeightMatrix;

constexpr int64_t kAlignment = 256;
constexpr int64_t kSlotBytes = int64_t{32} << 20;
constexpr int64_t kPieceElements = int64_t{1} << 18;  // of one thread at a time

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Elements [begin, begin + count) of an array of floats of any dtype, as `type`: f16 only from f16.
void ToHalf(HalfType type, DType dtype, const void* data, int64_t begin, int64_t count,
            uint16_t* out) {
  const char* from = static_cast<const char*>(data) + begin * DTypeBytes(dtype);
  if (dtype == DType::kBf16 || type == HalfType::kF16) {
    std::memcpy(out, from, static_cast<size_t>(count) * sizeof(uint16_t));
    return;
  }
  constexpr int64_t kBlock = 1024;
  float wide[kBlock];
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = std::min(kBlock, count - at);
    WidenToFloat(dtype, from + at * DTypeBytes(dtype), n, wide);
    FloatToBf16({wide, static_cast<size_t>(n)}, out + at);
  }
}

// f16 if all matrices are.
HalfType TypeOf(const ModelConfig& config, const Weights& weights) {
  bool half = weights.embedding().dtype == DType::kF16 && weights.head().dtype == DType::kF16;
  for (Layer layer(0); layer.value() < config.shape.layers; layer = layer.next()) {
    const LayerWeights& w = weights.layer(layer);
    for (const WeightMatrix* matrix : {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down}) {
      half = half && matrix->dtype == DType::kF16;
    }
  }
  return half ? HalfType::kF16 : HalfType::kBf16;
}

}  // namespace

// Lays the weights out one after the other; without memory it only counts.
class CudaWeightsLoader {
 public:
  explicit CudaWeightsLoader(const ModelConfig& config) : config_(config) {}

  int64_t Count() {
    // Sizes follow from the config; Load has checked the checkpoint against it.
    const int64_t hidden = config_.hidden_size, inner = config_.intermediate_size;
    const int64_t q = int64_t{config_.shape.q_heads} * config_.shape.head_dim;
    const int64_t qkv = q + int64_t{2} * config_.shape.kv_heads * config_.shape.head_dim;
    int64_t layer = Aligned(qkv * hidden * 2) + Aligned(hidden * q * 2) +
                    Aligned(2 * inner * hidden * 2) + Aligned(hidden * inner * 2) +
                    2 * Aligned(hidden * 4);
    if (config_.qkv_bias) layer += Aligned(qkv * 4);
    if (config_.output_bias) layer += Aligned(hidden * 4);
    if (config_.mlp_bias) layer += Aligned(2 * inner * 4) + Aligned(hidden * 4);
    if (config_.qk_norm) layer += 2 * Aligned(config_.shape.head_dim * 4);
    const int64_t table = Aligned(config_.vocab_size * hidden * 2);
    return layer * config_.shape.layers + table * (config_.tie_word_embeddings ? 1 : 2) +
           Aligned(hidden * 4) + Aligned(config_.shape.head_dim / 2 * 4);
  }

  absl::StatusOr<CudaWeights> Load(const Weights& weights, ThreadPool* pool) {
    pool_ = pool;
    out_.type_ = TypeOf(config_, weights);
    ASSIGN_OR_RETURN(out_.memory_, cuda::DeviceBuffer<uint8_t>::Create(Count()));
    ASSIGN_OR_RETURN(stream_, cuda::Stream::Create());
    ASSIGN_OR_RETURN(cuda::PinnedRing ring, cuda::PinnedRing::Create(2, kSlotBytes));
    ring_ = &ring;
    RETURN_IF_ERROR(Matrix({weights.embedding()}, nullptr, &out_.embedding_));
    if (config_.tie_word_embeddings) {
      out_.head_.w = out_.embedding_;
    } else {
      RETURN_IF_ERROR(Matrix({weights.head()}, nullptr, &out_.head_.w));
    }
    out_.head_.out = config_.vocab_size;
    out_.head_.in = config_.hidden_size;
    for (Layer layer(0); layer.value() < config_.shape.layers; layer = layer.next()) {
      RETURN_IF_ERROR(LoadLayer(weights.layer(layer)));
    }
    RETURN_IF_ERROR(Vector(weights.final_norm(), &out_.final_norm_));
    RETURN_IF_ERROR(Vector(RopeInvFreq(config_.rope, config_.shape.head_dim), &out_.inv_freq_));
    RETURN_IF_ERROR(stream_.Synchronize());
    CARREL_CHECK(used_ == out_.memory_.size());
    return std::move(out_);
  }

 private:
  absl::Status LoadLayer(const LayerWeights& w) {
    CudaLayerWeights layer;
    RETURN_IF_ERROR(Product({w.q, w.k, w.v}, layer.qkv));
    RETURN_IF_ERROR(Product({w.o}, layer.o));
    RETURN_IF_ERROR(Product({w.gate, w.up}, layer.gate_up));
    RETURN_IF_ERROR(Product({w.down}, layer.down));
    RETURN_IF_ERROR(Vector(w.attention_norm, &layer.attention_norm));
    RETURN_IF_ERROR(Vector(w.mlp_norm, &layer.mlp_norm));
    if (config_.qk_norm) {
      RETURN_IF_ERROR(Vector(w.q_norm, &layer.q_norm));
      RETURN_IF_ERROR(Vector(w.k_norm, &layer.k_norm));
    }
    out_.layers_.push_back(layer);
    return absl::OkStatus();
  }

  absl::Status Product(const std::vector<WeightMatrix>& parts, CudaMatrix& matrix) {
    for (const WeightMatrix& part : parts) matrix.out += part.out;
    matrix.in = parts[0].in;
    return Matrix(parts, &matrix.bias, &matrix.w);
  }

  uint8_t* Take(int64_t bytes) {
    uint8_t* const at = out_.memory_.data() + used_;
    used_ += Aligned(bytes);
    CARREL_CHECK(used_ <= out_.memory_.size());
    return at;
  }

  // The parts below each other, and their biases if they have any.
  absl::Status Matrix(const std::vector<WeightMatrix>& parts, const float** bias, const void** w) {
    int64_t elements = 0, rows = 0;
    for (const WeightMatrix& part : parts) {
      elements += part.out * part.in;
      rows += part.out;
    }
    uint8_t* to = Take(elements * 2);
    *w = to;
    for (const WeightMatrix& part : parts) {
      RETURN_IF_ERROR(CopyHalf(part.dtype, part.data, part.out * part.in, to));
      to += part.out * part.in * 2;
    }
    if (bias == nullptr || parts[0].bias == nullptr) return absl::OkStatus();
    std::vector<float> values(static_cast<size_t>(rows));
    int64_t at = 0;
    for (const WeightMatrix& part : parts) {
      WidenToFloat(part.dtype, part.bias, part.out, values.data() + at);
      at += part.out;
    }
    return Vector(values, bias);
  }

  absl::Status CopyHalf(DType dtype, const void* data, int64_t elements, uint8_t* to) {
    constexpr int64_t kSlotElements = kSlotBytes / 2;
    for (int64_t at = 0; at < elements; at += kSlotElements) {
      const int64_t n = std::min(kSlotElements, elements - at);
      ASSIGN_OR_RETURN(const absl::Span<uint8_t> slot, ring_->Acquire());
      auto* const rounded = reinterpret_cast<uint16_t*>(slot.data());
      pool_->ParallelFor((n + kPieceElements - 1) / kPieceElements, [&](int64_t piece) {
        const int64_t begin = piece * kPieceElements;
        ToHalf(out_.type_, dtype, data, at + begin, std::min(kPieceElements, n - begin),
               rounded + begin);
      });
      RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to + at * 2, rounded, static_cast<size_t>(n) * 2,
                                           cudaMemcpyHostToDevice, stream_.get()));
      RETURN_IF_ERROR(ring_->Release(stream_));
    }
    return absl::OkStatus();
  }

  absl::Status Vector(const std::vector<float>& values, const float** to) {
    const int64_t bytes = static_cast<int64_t>(values.size()) * 4;
    uint8_t* const at = Take(bytes);
    *to = reinterpret_cast<const float*>(at);
    // A norm's weights fit a slot many times over.
    ASSIGN_OR_RETURN(const absl::Span<uint8_t> slot, ring_->Acquire());
    CARREL_CHECK(bytes <= static_cast<int64_t>(slot.size()));
    std::memcpy(slot.data(), values.data(), static_cast<size_t>(bytes));
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(at, slot.data(), static_cast<size_t>(bytes),
                                         cudaMemcpyHostToDevice, stream_.get()));
    return ring_->Release(stream_);
  }

  const ModelConfig& config_;
  ThreadPool* pool_ = nullptr;
  CudaWeights out_;
  int64_t used_ = 0;
  cuda::Stream stream_;
  cuda::PinnedRing* ring_ = nullptr;
};

int64_t CudaWeights::Bytes(const ModelConfig& config) { return CudaWeightsLoader(config).Count(); }

absl::StatusOr<CudaWeights> CudaWeights::Load(const ModelConfig& config, const Weights& weights,
                                              ThreadPool* pool) {
  ASSIGN_OR_RETURN(const std::shared_ptr<const Weights> widened, weights.Widened(pool));
  return CudaWeightsLoader(config).Load(widened == nullptr ? weights : *widened, pool);
}

}  // namespace carrel::model
