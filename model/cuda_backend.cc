#include "model/cuda_backend.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"
#include "kernels/layer/gather_rows/gather_rows_cuda.h"
#include "kernels/layer/half_convert/half_convert.h"
#include "kernels/layer/rms_norm/rms_norm_cuda.h"
#include "kernels/layer/silu_mul/silu_mul_cuda.h"

namespace carrel::model {
namespace {

constexpr int64_t kAlignment = 256;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t QkvWidth(const AttentionShape& shape) {
  return int64_t{shape.q_heads + 2 * shape.kv_heads} * shape.head_dim;
}

struct ScratchSizes {
  int64_t normed, wide, gated;
  int64_t total() const { return normed + wide + gated + kernels::LinearCuda::kWorkspaceBytes; }
};

ScratchSizes Sizes(const ModelConfig& config, int64_t n) {
  ScratchSizes sizes;
  sizes.normed = Aligned(n * config.hidden_size * 2);
  sizes.wide = Aligned(n * std::max(QkvWidth(config.shape), 2 * config.intermediate_size) * 4);
  // Attention's output is turned into f16 there before the gate is.
  sizes.gated = Aligned(
      n *
      std::max(config.intermediate_size, int64_t{config.shape.q_heads} * config.shape.head_dim) *
      2);
  return sizes;
}

}  // namespace

int64_t CudaBackend::ScratchBytes(const ModelConfig& config, int64_t block_tokens) {
  return Sizes(config, block_tokens).total();
}

absl::Status CudaBackend::Check(const ModelConfig& config) {
  int devices = 0;
  RETURN_IF_CUDA_ERROR(cudaGetDeviceCount(&devices));
  if (config.experts.count > 0) {
    return absl::UnimplementedError("device cuda: experts (qwen3_moe) run on the CPU only");
  }
  if (config.gemma) {
    return absl::UnimplementedError("device cuda: gemma3_text runs on the CPU only");
  }
  const AttentionShape& shape = config.shape;
  if (!kernels::PrefillAttentionHas(kernels::PrefillAttentionVariant::kAuto, shape.head_dim)) {
    return absl::UnimplementedError(
        absl::StrCat("device cuda: head_dim=", shape.head_dim, " is none of 16, 32, 64, 96, 128"));
  }
  for (const auto& [name, value] :
       {std::pair<const char*, int64_t>{"hidden_size", config.hidden_size},
        {"intermediate_size", config.intermediate_size},
        {"vocab_size", config.vocab_size}}) {
    if (value % 8 != 0) {
      return absl::UnimplementedError(
          absl::StrCat("device cuda: ", name, "=", value, " is not a multiple of 8"));
    }
  }
  return absl::OkStatus();
}

CudaBackend::CudaBackend(const ModelConfig& config, std::shared_ptr<const CudaWeights> weights,
                         int64_t block_tokens, Rope rope)
    : config_(config), weights_(std::move(weights)), block_tokens_(block_tokens), rope_(rope) {}

absl::StatusOr<std::unique_ptr<CudaBackend>> CudaBackend::Create(
    const ModelConfig& config, const std::shared_ptr<const Weights>& weights, int64_t block_tokens,
    ThreadPool* pool, const std::shared_ptr<const Adapter>& adapter, Rope rope) {
  CARREL_CHECK(weights != nullptr);
  RETURN_IF_ERROR(Check(config));
  ASSIGN_OR_RETURN(std::shared_ptr<const CudaWeights> on_device,
                   CudaWeights::Shared(config, weights, pool, adapter));
  return Create(config, std::move(on_device), block_tokens, rope);
}

absl::StatusOr<std::unique_ptr<CudaBackend>> CudaBackend::Create(
    const ModelConfig& config, std::shared_ptr<const CudaWeights> weights, int64_t block_tokens,
    Rope rope) {
  CARREL_CHECK(weights != nullptr && block_tokens > 0);
  std::unique_ptr<CudaBackend> backend(
      new CudaBackend(config, std::move(weights), block_tokens, rope));
  ASSIGN_OR_RETURN(backend->stream_, cuda::Stream::Create());
  const ScratchSizes sizes = Sizes(config, block_tokens);
  ASSIGN_OR_RETURN(backend->scratch_, cuda::DeviceBuffer<uint8_t>::Create(sizes.total()));
  uint8_t* at = backend->scratch_.data();
  ASSIGN_OR_RETURN(backend->linear_, kernels::LinearCuda::Create(at));
  at += kernels::LinearCuda::kWorkspaceBytes;
  backend->normed_ = at;
  at += sizes.normed;
  backend->projected_ = reinterpret_cast<float*>(at);
  at += sizes.wide;
  backend->gated_ = at;
  return backend;
}

absl::Status CudaBackend::Embed(const int32_t* ids, int64_t n, float* hidden) {
  RETURN_IF_CUDA_ERROR(kernels::GatherHalfRowsCuda(
      weights_->embedding(), ids, n, config_.hidden_size, hidden, stream_.get(), weights_->type()));
  return absl::OkStatus();
}

absl::Status CudaBackend::Norm(const float* hidden, int64_t n, const float* w) {
  CARREL_CHECK(n <= block_tokens_);
  RETURN_IF_CUDA_ERROR(kernels::RmsNormCuda(hidden, n, config_.hidden_size, w,
                                            static_cast<float>(config_.rms_norm_eps), normed_,
                                            stream_.get(), weights_->type()));
  return absl::OkStatus();
}

absl::Status CudaBackend::Linear(const CudaMatrix& matrix, const void* x, int64_t n, float* y,
                                 bool accumulate) {
  kernels::LinearCudaParams params;
  params.x = x;
  params.w = matrix.w;
  params.bias = matrix.bias;
  params.n = n;
  params.in = matrix.in;
  params.out = matrix.out;
  params.y = y;
  params.accumulate = accumulate;
  params.type = weights_->type();
  RETURN_IF_CUDA_ERROR(linear_->Run(params, stream_.get()));
  return absl::OkStatus();
}

absl::Status CudaBackend::Rotate(Layer layer, const CudaMatrix& matrix, int64_t n,
                                 const CudaPlacement& placement, const float* drift, void* q,
                                 float* q_exact, bool query_only) {
  const CudaLayerWeights& w = weights_->layer(layer);
  kernels::RopeCudaParams params;
  params.qkv = projected_;
  params.bias = matrix.bias;
  params.q_norm = w.q_norm;
  params.k_norm = w.k_norm;
  params.eps = static_cast<float>(config_.rms_norm_eps);
  params.scale = static_cast<float>(config_.rope.attention_factor);
  params.drift = drift;
  params.inv_freq = inv_freq();
  params.n = n;
  params.q_heads = config_.shape.q_heads;
  params.kv_heads = config_.shape.kv_heads;
  params.head_dim = config_.shape.head_dim;
  params.first_position = placement.first_position;
  params.step = placement.step;
  params.q = static_cast<kernels::Bf16*>(q);
  params.q_exact = q_exact;
  if (!query_only) {
    params.first_row = placement.first_row;
    params.kv = placement.kv;
    params.rows = placement.rows;
    params.layer = layer.value();
    params.q_exact_rows = placement.q_exact_rows;
  }
  RETURN_IF_CUDA_ERROR(kernels::RopeCuda(params, stream_.get()));
  return absl::OkStatus();
}

absl::Status CudaBackend::ProjectQkv(Layer layer, const float* hidden, int64_t n,
                                     const CudaPlacement& placement, void* q, float* q_exact) {
  const CudaLayerWeights& w = weights_->layer(layer);
  RETURN_IF_ERROR(Norm(hidden, n, w.attention_norm));
  // The bias is added where the rest of a head's arithmetic is.
  CudaMatrix matrix = w.qkv;
  matrix.bias = nullptr;
  RETURN_IF_ERROR(Linear(matrix, normed_, n, projected_, /*accumulate=*/false));
  return Rotate(layer, w.qkv, n, placement, nullptr, q, q_exact, /*query_only=*/false);
}

absl::Status CudaBackend::ProjectQuery(Layer layer, const float* hidden, int64_t n,
                                       const CudaPlacement& placement, const float* drift, void* q,
                                       float* q_exact) {
  const CudaLayerWeights& w = weights_->layer(layer);
  RETURN_IF_ERROR(Norm(hidden, n, w.attention_norm));
  CudaMatrix matrix = w.qkv;
  matrix.out = int64_t{config_.shape.q_heads} * config_.shape.head_dim;
  matrix.bias = nullptr;
  RETURN_IF_ERROR(Linear(matrix, normed_, n, projected_, /*accumulate=*/false));
  return Rotate(layer, w.qkv, n, placement, drift, q, q_exact, /*query_only=*/true);
}

absl::Status CudaBackend::FinishLayer(Layer layer, const void* attended, int64_t n, float* hidden) {
  const CudaLayerWeights& w = weights_->layer(layer);
  if (weights_->type() == kernels::HalfType::kF16) {
    RETURN_IF_CUDA_ERROR(kernels::Bf16ToF16Cuda(attended, n * w.o.in, gated_, stream_.get()));
    attended = gated_;
  }
  RETURN_IF_ERROR(Linear(w.o, attended, n, hidden, /*accumulate=*/true));
  RETURN_IF_ERROR(Norm(hidden, n, w.mlp_norm));
  RETURN_IF_ERROR(Linear(w.gate_up, normed_, n, projected_, /*accumulate=*/false));
  RETURN_IF_CUDA_ERROR(kernels::SiluMulCuda(projected_, n, config_.intermediate_size, gated_,
                                            stream_.get(), weights_->type()));
  return Linear(w.down, gated_, n, hidden, /*accumulate=*/true);
}

absl::Status CudaBackend::Logits(const float* hidden, int64_t n, float* logits) {
  RETURN_IF_ERROR(Norm(hidden, n, weights_->final_norm()));
  return Linear(weights_->head(), normed_, n, logits, /*accumulate=*/false);
}

}  // namespace carrel::model
