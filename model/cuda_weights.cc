#include "model/cuda_weights.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/cuda/pinned_ring.h"
#include "common/cuda/status.h"
#include "common/cuda/stream.h"
#include "common/dtype.h"
#include "common/f16.h"
#include "common/status.h"
#include "model/adapter.h"
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

// The same of the sum of weight and what is added.
void SumToHalf(HalfType type, const WeightMatrix& matrix, const LowRankProduct& added,
               int64_t begin, int64_t count, uint16_t* out) {
  constexpr int64_t kBlock = 1024;
  float wide[kBlock];
  const char* const data = static_cast<const char*>(matrix.data);
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = std::min(kBlock, count - at);
    WidenToFloat(matrix.dtype, data + (begin + at) * DTypeBytes(matrix.dtype), n, wide);
    added.AddTo(begin + at, n, wide);
    if (type == HalfType::kBf16) {
      FloatToBf16({wide, static_cast<size_t>(n)}, out + at);
      continue;
    }
    for (int64_t i = 0; i < n; ++i) {
      out[at + i] = FloatToF16(wide[i]);
    }
  }
}

// A matrix, and what an adapter adds to it (may be null).
struct Part {
  WeightMatrix matrix;
  const LowRank* added = nullptr;
};

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
  explicit CudaWeightsLoader(const ModelConfig& config, const Adapter* adapter = nullptr)
      : config_(config), adapter_(adapter) {}

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
    RETURN_IF_ERROR(Matrix({{weights.embedding()}}, nullptr, &out_.embedding_));
    if (config_.tie_word_embeddings) {
      out_.head_.w = out_.embedding_;
    } else {
      RETURN_IF_ERROR(Matrix({{weights.head()}}, nullptr, &out_.head_.w));
    }
    out_.head_.out = config_.vocab_size;
    out_.head_.in = config_.hidden_size;
    for (Layer layer(0); layer.value() < config_.shape.layers; layer = layer.next()) {
      RETURN_IF_ERROR(LoadLayer(layer, weights.layer(layer)));
    }
    RETURN_IF_ERROR(Vector(weights.final_norm(), &out_.final_norm_));
    RETURN_IF_ERROR(Vector(RopeInvFreq(config_.rope, config_.shape.head_dim), &out_.inv_freq_));
    RETURN_IF_ERROR(stream_.Synchronize());
    CARREL_CHECK(used_ == out_.memory_.size());
    return std::move(out_);
  }

 private:
  absl::Status LoadLayer(Layer index, const LayerWeights& w) {
    const auto part = [&](const WeightMatrix& matrix, Projection projection) {
      return Part{matrix, adapter_ == nullptr ? nullptr : adapter_->Find(index, projection)};
    };
    CudaLayerWeights layer;
    RETURN_IF_ERROR(
        Product({part(w.q, Projection::kQ), part(w.k, Projection::kK), part(w.v, Projection::kV)},
                layer.qkv));
    RETURN_IF_ERROR(Product({part(w.o, Projection::kO)}, layer.o));
    RETURN_IF_ERROR(
        Product({part(w.gate, Projection::kGate), part(w.up, Projection::kUp)}, layer.gate_up));
    RETURN_IF_ERROR(Product({part(w.down, Projection::kDown)}, layer.down));
    RETURN_IF_ERROR(Vector(w.attention_norm, &layer.attention_norm));
    RETURN_IF_ERROR(Vector(w.mlp_norm, &layer.mlp_norm));
    if (config_.qk_norm) {
      RETURN_IF_ERROR(Vector(w.q_norm, &layer.q_norm));
      RETURN_IF_ERROR(Vector(w.k_norm, &layer.k_norm));
    }
    out_.layers_.push_back(layer);
    return absl::OkStatus();
  }

  absl::Status Product(const std::vector<Part>& parts, CudaMatrix& matrix) {
    for (const Part& part : parts) matrix.out += part.matrix.out;
    matrix.in = parts[0].matrix.in;
    return Matrix(parts, &matrix.bias, &matrix.w);
  }

  uint8_t* Take(int64_t bytes) {
    uint8_t* const at = out_.memory_.data() + used_;
    used_ += Aligned(bytes);
    CARREL_CHECK(used_ <= out_.memory_.size());
    return at;
  }

  // The parts below each other, and their biases if they have any.
  absl::Status Matrix(const std::vector<Part>& parts, const float** bias, const void** w) {
    int64_t elements = 0, rows = 0;
    for (const Part& part : parts) {
      elements += part.matrix.out * part.matrix.in;
      rows += part.matrix.out;
    }
    uint8_t* to = Take(elements * 2);
    *w = to;
    for (const auto& [part, added] : parts) {
      RETURN_IF_ERROR(CopyHalf(part, added, to));
      to += part.out * part.in * 2;
    }
    if (bias == nullptr || parts[0].matrix.bias == nullptr) return absl::OkStatus();
    std::vector<float> values(static_cast<size_t>(rows));
    int64_t at = 0;
    for (const auto& [part, added] : parts) {
      WidenToFloat(part.dtype, part.bias, part.out, values.data() + at);
      at += part.out;
    }
    return Vector(values, bias);
  }

  absl::Status CopyHalf(const WeightMatrix& matrix, const LowRank* added, uint8_t* to) {
    constexpr int64_t kSlotElements = kSlotBytes / 2;
    const int64_t elements = matrix.out * matrix.in;
    std::optional<LowRankProduct> product;
    if (added != nullptr) product.emplace(*added);
    for (int64_t at = 0; at < elements; at += kSlotElements) {
      const int64_t n = std::min(kSlotElements, elements - at);
      ASSIGN_OR_RETURN(const absl::Span<uint8_t> slot, ring_->Acquire());
      auto* const rounded = reinterpret_cast<uint16_t*>(slot.data());
      pool_->ParallelFor((n + kPieceElements - 1) / kPieceElements, [&](int64_t piece) {
        const int64_t begin = piece * kPieceElements;
        const int64_t count = std::min(kPieceElements, n - begin);
        if (product.has_value()) {
          SumToHalf(out_.type_, matrix, *product, at + begin, count, rounded + begin);
        } else {
          ToHalf(out_.type_, matrix.dtype, matrix.data, at + begin, count, rounded + begin);
        }
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
  const Adapter* const adapter_;  // may be null
  ThreadPool* pool_ = nullptr;
  CudaWeights out_;
  int64_t used_ = 0;
  cuda::Stream stream_;
  cuda::PinnedRing* ring_ = nullptr;
};

namespace {

// Weights that somebody holds. What they were made of is known by who owns it, not by its address, which
// another may have later; of the config they have beside the checkpoint only how RoPE turns.
class SharedWeights {
 public:
  static SharedWeights& OfProcess() {
    static auto* const shared = new SharedWeights;
    return *shared;
  }

  struct Key {
    std::weak_ptr<const Weights> weights;
    std::weak_ptr<const Adapter> adapter;
    std::vector<float> inv_freq;
    int device = 0;

    bool operator==(const Key& other) const {
      return Same(weights, other.weights) && Same(adapter, other.adapter) &&
             inv_freq == other.inv_freq && device == other.device;
    }
    template <class T>
    static bool Same(const std::weak_ptr<T>& a, const std::weak_ptr<T>& b) {
      return !a.owner_before(b) && !b.owner_before(a);
    }
  };

  absl::Mutex mu;

  std::shared_ptr<const CudaWeights> Find(const Key& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    for (const auto& [of, held] : held_) {
      if (std::shared_ptr<const CudaWeights> found = held.lock(); found != nullptr && of == key)
        return found;
    }
    return nullptr;
  }
  void Add(Key key, const std::shared_ptr<const CudaWeights>& weights)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    held_.remove_if([](const auto& one) { return one.second.expired(); });
    held_.emplace_back(std::move(key), weights);
  }

 private:
  std::list<std::pair<Key, std::weak_ptr<const CudaWeights>>> held_ ABSL_GUARDED_BY(mu);
};

SharedWeights::Key KeyOf(const ModelConfig& config, const std::shared_ptr<const Weights>& weights,
                         const std::shared_ptr<const Adapter>& adapter, int device) {
  return {weights, adapter, RopeInvFreq(config.rope, config.shape.head_dim), device};
}

}  // namespace

absl::StatusOr<std::shared_ptr<const CudaWeights>> CudaWeights::Shared(
    const ModelConfig& config, const std::shared_ptr<const Weights>& weights, ThreadPool* pool,
    const std::shared_ptr<const Adapter>& adapter) {
  int device = 0;
  RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  SharedWeights::Key key = KeyOf(config, weights, adapter, device);
  SharedWeights& shared = SharedWeights::OfProcess();
  absl::MutexLock lock(&shared.mu);
  std::shared_ptr<const CudaWeights> found = shared.Find(key);
  if (found != nullptr) return found;
  ASSIGN_OR_RETURN(CudaWeights loaded, Load(config, *weights, pool, adapter.get()));
  loaded.reserved_ = GpuReservation(Bytes(config));
  found = std::make_shared<const CudaWeights>(std::move(loaded));
  shared.Add(std::move(key), found);
  return found;
}

int64_t CudaWeights::SharedBytes(const ModelConfig& config,
                                 const std::shared_ptr<const Weights>& weights,
                                 const std::shared_ptr<const Adapter>& adapter) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return Bytes(config);
  SharedWeights& shared = SharedWeights::OfProcess();
  absl::MutexLock lock(&shared.mu);
  const bool held = shared.Find(KeyOf(config, weights, adapter, device)) != nullptr;
  return held ? 0 : Bytes(config);
}

int64_t CudaWeights::Bytes(const ModelConfig& config) { return CudaWeightsLoader(config).Count(); }

absl::StatusOr<CudaWeights> CudaWeights::Load(const ModelConfig& config, const Weights& weights,
                                              ThreadPool* pool, const Adapter* adapter) {
  ASSIGN_OR_RETURN(const std::shared_ptr<const Weights> widened, weights.Widened(pool));
  return CudaWeightsLoader(config, adapter).Load(widened == nullptr ? weights : *widened, pool);
}

}  // namespace carrel::model
