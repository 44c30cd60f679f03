#include "decoder/forward/cuda_repositioned_pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "common/cuda/buffer.h"
#include "common/cuda/range.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/select/host_rows.h"
#include "decoder/zone/opened_context.h"
#include "kernels/attention/block_sparse_attention/block_sparse_attention.h"
#include "kernels/layer/rope/rope_table.h"
#include "kernels/select/argmax/argmax_cuda.h"
#include "kernels/select/block_prune/block_prune.h"
#include "model/cuda_backend.h"
#include "model/device.h"

namespace carrel::decoder {
namespace {

using cuda::DeviceBuffer;
using cuda::PinnedBuffer;
using model::CudaBackend;

constexpr int64_t kMostBlockTokens = 64;               // of a prompt, at once
constexpr int64_t kMostScoreBytes = int64_t{1} << 29;  // of such a block's stage
constexpr int64_t kLogitsTokens = 16;                  // whose logits are on the device at once

// A stage of a layer with its budget.
struct Stage {
  int64_t chunk, wanted, refresh;
};

std::vector<Stage> StagesOf(const InfiniteHipConfig& config, int64_t budget) {
  std::vector<Stage> stages;
  for (const InfiniteHipStage& stage : config.stages) {
    // A later stage can only keep what an earlier one let through.
    const int64_t survivors = stage.multiple > 0 ? stage.multiple * budget : stage.survivors;
    const int64_t wanted = std::max(survivors, budget);
    int64_t chunk = stage.chunk;
    while (chunk > wanted) chunk /= 2;
    stages.push_back({chunk, wanted, stage.refresh});
  }
  return stages;
}

// Rows of units that were chosen, one list per unit.
struct Lists {
  absl::Status Allocate(int64_t units, int64_t list_stride) {
    stride = list_stride;
    ASSIGN_OR_RETURN(begins, DeviceBuffer<int32_t>::Create(units * stride));
    ASSIGN_OR_RETURN(heads, DeviceBuffer<kernels::ChosenRowsHead>::Create(units));
    return absl::OkStatus();
  }
  kernels::ChosenRows rows() const { return {begins.data(), stride, heads.data()}; }

  int64_t stride = 1;
  DeviceBuffer<int32_t> begins;
  DeviceBuffer<kernels::ChosenRowsHead> heads;
};

class CudaRepositionedPass final : public ForwardPass {
 public:
  CudaRepositionedPass(const model::ModelConfig& config, const OpenedContext& context)
      : config_(config),
        shape_(config.shape),
        infinite_hip_(SelectorOf(context.config)->infinite_hip),
        zone_(context.zone),
        context_tokens_(context.tokens),
        capacity_(context.tokens + context.device.new_tokens),
        in_host_(std::holds_alternative<HostZoneOptions>(context.config.zone)),
        width_(int64_t{shape_.q_heads} * shape_.head_dim),
        selections_(context.selections),
        budgets_(Budgets(selections_)),
        statistics_(shape_.layers) {}

  absl::Status Prepare(const model::Checkpoint& checkpoint, const OpenedContext& context);

  int64_t max_tokens() const override { return block_; }
  absl::Status Run(absl::Span<const TokenId> tokens, Position first_position) override;
  absl::Status Logits(int64_t count, float* logits) override;
  absl::StatusOr<TokenId> Greedy() override;
  void set_reading_prompt(bool reading) override {
    reading_prompt_ = reading;
    generated_ = 0;
  }
  void StartSequence() override {
    new_rows_ = 0;
    std::fill(kept_.begin(), kept_.end(), false);
  }
  Statistics statistics() const override;

 private:
  int64_t budget(Layer layer) const { return budgets_[static_cast<size_t>(layer.value())]; }
  bool takes_all(Layer layer) const {
    return budget(layer) == kAllRows || budget(layer) >= zone_.rows();
  }
  std::vector<Stage> StagesOfLayer(Layer layer) const {
    return takes_all(layer) ? std::vector<Stage>() : StagesOf(infinite_hip_, budget(layer));
  }
  int64_t row_elements() const { return int64_t{shape_.kv_heads} * capacity_ * shape_.head_dim; }
  kernels::KvRows kv(Layer layer) const {
    kernels::Bf16* const rows = in_host_ ? pinned_rows_.data() : device_rows_.data();
    kernels::Bf16* const k = rows + layer.value() * 2 * row_elements();
    return {k, k + row_elements(), capacity_};
  }
  Lists& kept(Layer layer, size_t stage) {
    return kept_lists_[static_cast<size_t>(layer.value()) * infinite_hip_.stages.size() + stage];
  }

  absl::Status Plan();
  absl::Status Allocate(const model::Checkpoint& checkpoint, ThreadPool* pool);
  absl::Status CopyRows(const HostRows& rows, ThreadPool* pool);
  int64_t OwnBytes() const;
  // Of n tokens from `first` of the block on: what they attend to, and the attention.
  absl::Status Attend(Layer layer, int64_t first, int64_t n);
  absl::Status Choose(Layer layer, const kernels::BlockLayout& layout, const uint16_t* q,
                      kernels::ChosenRows* chosen);
  absl::Status GatherQueries(Layer layer, const kernels::BlockLayout& layout, const uint16_t* q);

  const model::ModelConfig& config_;
  const AttentionShape shape_;
  const InfiniteHipConfig infinite_hip_;
  const RowRange zone_;
  const int64_t context_tokens_, capacity_;
  const bool in_host_;
  const int64_t width_;  // elements of all q heads of a token
  const std::vector<select::Selection> selections_;
  const std::vector<int64_t> budgets_;
  std::vector<LayerStatistics> statistics_;

  // By Plan, over all layers: rows and chunks that a unit may have, stretches after each stage, and the
  // tokens of a block.
  int64_t most_chunks_ = 1, block_ = 1;
  std::vector<int64_t> stretches_;

  std::unique_ptr<CudaBackend> backend_;
  DeviceBuffer<uint16_t> device_rows_;
  PinnedBuffer<uint16_t> pinned_rows_;
  DeviceBuffer<float> angles_, hidden_, logits_;
  DeviceBuffer<int32_t> ids_, best_;
  DeviceBuffer<uint16_t> q_, attended_, right_, left_;
  DeviceBuffer<uint32_t> scores_;
  Lists start_;
  std::vector<Lists> prompt_lists_;  // [stages], of a block of a prompt
  std::vector<Lists> kept_lists_;    // [layers, stages], of a generated token
  std::vector<bool> kept_;           // [layers]: there is something in them
  PinnedBuffer<int32_t> host_ids_, host_best_;
  PinnedBuffer<float> host_logits_;

  int64_t new_rows_ = 0;  // prompted and generated so far
  bool reading_prompt_ = false;
  int64_t generated_ = 0;  // since the prompt
  int64_t n_ = 0;          // tokens of the last Run
};

absl::Status CudaRepositionedPass::Plan() {
  stretches_.assign(infinite_hip_.stages.size(), 1);
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    int64_t rows = zone_.rows(), stretches = 1, length = 0;
    const std::vector<Stage> stages = StagesOfLayer(layer);
    for (size_t i = 0; i < stages.size(); ++i) {
      const auto& [chunk, wanted, refresh] = stages[i];
      if (rows > wanted) {
        if (length % chunk != 0) {
          return absl::UnimplementedError(
              absl::StrCat("rope=infinitehip with device=cuda: chunks of ", chunk,
                           " do not divide those of ", length, " of the stage before"));
        }
        most_chunks_ = std::max(most_chunks_, (rows + chunk - 1) / chunk);
        stretches = std::max(stretches, wanted / chunk);
        rows = wanted;
        length = chunk;
      }
      stretches_[i] = std::max(stretches_[i], stretches);
    }
  }
  for (size_t i = 1; i < stretches_.size(); ++i) {
    stretches_[i] = std::max(stretches_[i], stretches_[i - 1]);  // what goes on as it is
  }
  block_ = std::clamp<int64_t>(kMostScoreBytes / (4 * shape_.kv_heads * most_chunks_), 1,
                               std::min(kMostBlockTokens, capacity_ - context_tokens_));
  return absl::OkStatus();
}

int64_t CudaRepositionedPass::OwnBytes() const {
  int64_t lists = 1;
  for (const int64_t stretches : stretches_) lists += stretches + 3;
  const int64_t units = block_ * shape_.kv_heads;
  return (in_host_ ? 0 : 2 * shape_.layers * row_elements() * 2) +
         config_.max_position_embeddings * shape_.head_dim * 4 +
         block_ * (config_.hidden_size * 4 + 4 * width_ * 2 + 4) +
         kLogitsTokens * config_.vocab_size * 4 + units * most_chunks_ * 4 +
         (units + shape_.layers * shape_.kv_heads) * lists * 4;
}

absl::Status CudaRepositionedPass::Allocate(const model::Checkpoint& checkpoint, ThreadPool* pool) {
  ASSIGN_OR_RETURN(backend_, CudaBackend::Create(config_, checkpoint.weights, block_, pool,
                                                 checkpoint.adapter.get(), Rope::kInfiniteHip));
  const int64_t elements = 2 * shape_.layers * row_elements(), units = block_ * shape_.kv_heads;
  if (in_host_) {
    ASSIGN_OR_RETURN(pinned_rows_, PinnedBuffer<uint16_t>::Create(elements));
  } else {
    ASSIGN_OR_RETURN(device_rows_, DeviceBuffer<uint16_t>::Create(elements));
  }
  const kernels::RopeTable table(model::RopeInvFreq(config_.rope, shape_.head_dim),
                                 config_.max_position_embeddings);
  ASSIGN_OR_RETURN(angles_,
                   DeviceBuffer<float>::Create(static_cast<int64_t>(table.angles().size())));
  RETURN_IF_CUDA_ERROR(cudaMemcpy(angles_.data(), table.angles().data(),
                                  static_cast<size_t>(angles_.bytes()), cudaMemcpyHostToDevice));
  ASSIGN_OR_RETURN(hidden_, DeviceBuffer<float>::Create(block_ * config_.hidden_size));
  ASSIGN_OR_RETURN(logits_, DeviceBuffer<float>::Create(kLogitsTokens * config_.vocab_size));
  for (DeviceBuffer<uint16_t>* buffer : {&q_, &attended_, &right_, &left_}) {
    ASSIGN_OR_RETURN(*buffer, DeviceBuffer<uint16_t>::Create(block_ * width_));
  }
  ASSIGN_OR_RETURN(ids_, DeviceBuffer<int32_t>::Create(block_));
  ASSIGN_OR_RETURN(best_, DeviceBuffer<int32_t>::Create(1));
  ASSIGN_OR_RETURN(scores_, DeviceBuffer<uint32_t>::Create(units * most_chunks_));
  ASSIGN_OR_RETURN(host_ids_, PinnedBuffer<int32_t>::Create(block_));
  ASSIGN_OR_RETURN(host_best_, PinnedBuffer<int32_t>::Create(1));
  ASSIGN_OR_RETURN(host_logits_, PinnedBuffer<float>::Create(kLogitsTokens * config_.vocab_size));
  RETURN_IF_ERROR(start_.Allocate(units, 1));
  prompt_lists_.resize(stretches_.size());
  for (size_t i = 0; i < stretches_.size(); ++i) {
    RETURN_IF_ERROR(prompt_lists_[i].Allocate(units, stretches_[i]));
  }
  kept_lists_.resize(static_cast<size_t>(shape_.layers) * stretches_.size());
  kept_.assign(static_cast<size_t>(shape_.layers), false);
  for (size_t i = 0; i < kept_lists_.size(); ++i) {
    RETURN_IF_ERROR(kept_lists_[i].Allocate(shape_.kv_heads, stretches_[i % stretches_.size()]));
  }
  return absl::OkStatus();
}

absl::Status CudaRepositionedPass::CopyRows(const HostRows& rows, ThreadPool* pool) {
  constexpr int64_t kUnitRows = 65536;
  const int64_t units = (context_tokens_ + kUnitRows - 1) / kUnitRows, d = shape_.head_dim;
  std::vector<absl::Status> failed(static_cast<size_t>(shape_.layers * shape_.kv_heads * units));
  pool->ParallelFor(static_cast<int64_t>(failed.size()), [&](int64_t i) {
    const Layer layer(static_cast<int32_t>(i / units / shape_.kv_heads));
    const KvHead head(static_cast<int32_t>(i / units % shape_.kv_heads));
    const HeadView& from = rows.At(layer, head);
    const Position end = std::min(context_tokens_, (i % units + 1) * kUnitRows);
    for (Position row = i % units * kUnitRows; row < end;) {
      const int64_t count = from.Contiguous(row, end);
      const int64_t to = (head.value() * capacity_ + row) * d;
      for (const auto& [rows_to, rows_from] :
           {std::pair{kv(layer).k + to, from.Key(row)}, {kv(layer).v + to, from.Value(row)}}) {
        const cudaError_t error =
            cudaMemcpy(rows_to, rows_from, static_cast<size_t>(count * d * 2), cudaMemcpyDefault);
        if (error != cudaSuccess)
          failed[static_cast<size_t>(i)] = cuda::CudaStatus(error, "cudaMemcpy");
      }
      row += count;
    }
  });
  for (const absl::Status& status : failed) RETURN_IF_ERROR(status);
  return rows.CheckUnchanged();
}

absl::Status CudaRepositionedPass::Prepare(const model::Checkpoint& checkpoint,
                                           const OpenedContext& context) {
  RETURN_IF_ERROR(CudaBackend::Check(config_));
  if (shape_.head_dim != 64 && shape_.head_dim != 128) {
    return absl::UnimplementedError(
        absl::StrCat("device cuda: decoding needs head_dim 64 or 128; the model has head_dim=",
                     shape_.head_dim));
  }
  RETURN_IF_ERROR(Plan());
  RETURN_IF_ERROR(model::CheckGpuMemory(CudaBackend::Bytes(config_, block_) + OwnBytes(),
                                        context.device.gpu_memory));
  RETURN_IF_ERROR(Allocate(checkpoint, context.pool));
  return Annotate(CopyRows(*context.rows, context.pool), "copying rows of the context");
}

absl::Status CudaRepositionedPass::GatherQueries(Layer layer, const kernels::BlockLayout& layout,
                                                 const uint16_t* q) {
  const bool relative = layer.value() >= model::kChunkIndexedLayers;
  kernels::BlockQueriesParams params;
  params.layout = layout;
  params.q = q;
  params.kv_heads = shape_.kv_heads;
  params.group = shape_.group();
  params.head_dim = shape_.head_dim;
  params.stride_q = 1;
  if (relative) params.table = {angles_.data(), config_.max_position_embeddings};
  params.right = right_.data();
  params.left = relative ? left_.data() : nullptr;
  RETURN_IF_CUDA_ERROR(kernels::GatherBlockQueries(params, backend_->stream().get()));
  return absl::OkStatus();
}

absl::Status CudaRepositionedPass::Choose(Layer layer, const kernels::BlockLayout& layout,
                                          const uint16_t* q, kernels::ChosenRows* chosen) {
  const cudaStream_t stream = backend_->stream().get();
  RETURN_IF_CUDA_ERROR(kernels::StartBlockPrune(layout, shape_.kv_heads, start_.rows(), stream));
  *chosen = start_.rows();
  const std::vector<Stage> stages = StagesOfLayer(layer);
  if (stages.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(GatherQueries(layer, layout, q));
  const bool relative = layer.value() >= model::kChunkIndexedLayers;
  kernels::BlockPruneParams prune;
  prune.layout = layout;
  prune.right = right_.data();
  prune.left = relative ? left_.data() : nullptr;
  prune.queries = shape_.group();
  prune.kv_heads = shape_.kv_heads;
  prune.head_dim = shape_.head_dim;
  prune.kv = kv(layer);
  if (!relative) prune.table = {angles_.data(), config_.max_position_embeddings};
  prune.max_rows = zone_.rows();
  prune.scores = scores_.data();
  bool changed = reading_prompt_ || !kept_[static_cast<size_t>(layer.value())];
  for (size_t i = 0; i < stages.size(); ++i) {
    const Stage& stage = stages[i];
    changed = changed || generated_ % stage.refresh == 0;
    if (prune.max_rows <= stage.wanted) continue;  // all goes on
    prune.in = *chosen;
    prune.out = reading_prompt_ ? prompt_lists_[i].rows() : kept(layer, i).rows();
    prune.chunk = stage.chunk;
    prune.wanted = stage.wanted;
    if (changed) RETURN_IF_CUDA_ERROR(kernels::BlockPrune(prune, stream));
    prune.max_rows = stage.wanted;
    *chosen = prune.out;
  }
  if (!reading_prompt_) kept_[static_cast<size_t>(layer.value())] = true;
  return absl::OkStatus();
}

absl::Status CudaRepositionedPass::Attend(Layer layer, int64_t first, int64_t n) {
  kernels::BlockSparseAttentionParams attend;
  attend.layout.first_position = context_tokens_ + new_rows_ + first;
  attend.layout.n = n;
  attend.layout.block_q = 1;
  attend.layout.sink_tokens = zone_.begin;
  attend.layout.zone_limit = zone_.end;
  attend.q = q_.data() + first * width_;
  RETURN_IF_ERROR(Choose(layer, attend.layout, attend.q, &attend.chosen));
  attend.kv = kv(layer);
  attend.kv_heads = shape_.kv_heads;
  attend.group = shape_.group();
  attend.head_dim = shape_.head_dim;
  attend.table = {angles_.data(), config_.max_position_embeddings};
  attend.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
  attend.out = attended_.data() + first * width_;
  RETURN_IF_CUDA_ERROR(kernels::BlockSparseAttention(attend, backend_->stream().get()));
  return absl::OkStatus();
}

absl::Status CudaRepositionedPass::Run(absl::Span<const TokenId> tokens, Position first_position) {
  const cuda::Range range("tokens");
  const auto n = static_cast<int64_t>(tokens.size());
  CARREL_CHECK(n >= 1 && n <= block_ && first_position == context_tokens_ + new_rows_);
  for (TokenId token : tokens) {
    if (token >= 0 && token < config_.vocab_size) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "token id ", token, " is outside the vocabulary [0, ", config_.vocab_size, ")"));
  }
  if (context_tokens_ + new_rows_ + n > capacity_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there is room for ", capacity_ - context_tokens_,
                     " new tokens (gpu_new_tokens); ", new_rows_ + n, " are needed"));
  }
  const cuda::Stream& stream = backend_->stream();
  RETURN_IF_ERROR(stream.Synchronize());  // what the last block reads of pinned memory is read
  std::copy(tokens.begin(), tokens.end(), host_ids_.data());
  n_ = n;
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(ids_.data(), host_ids_.data(),
                                       static_cast<size_t>(n) * sizeof(int32_t),
                                       cudaMemcpyHostToDevice, stream.get()));
  RETURN_IF_ERROR(backend_->Embed(ids_.data(), n, hidden_.data()));
  const int64_t generated = generated_;
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    model::CudaPlacement placement;
    placement.first_row = context_tokens_ + new_rows_;
    placement.kv = kv(layer);
    RETURN_IF_ERROR(backend_->ProjectQkv(layer, hidden_.data(), n, placement, q_.data(), nullptr));
    if (reading_prompt_) {
      RETURN_IF_ERROR(Attend(layer, 0, n));
    } else {
      // One after the other: what one chose serves the next.
      generated_ = generated;
      for (int64_t i = 0; i < n; ++i, ++generated_) RETURN_IF_ERROR(Attend(layer, i, 1));
    }
    RETURN_IF_ERROR(backend_->FinishLayer(layer, attended_.data(), n, hidden_.data()));
    LayerStatistics& statistics = statistics_[static_cast<size_t>(layer.value())];
    const int64_t attended = takes_all(layer) ? zone_.rows() : budget(layer);
    statistics.tokens += n;
    statistics.rows_attended += n * attended * shape_.kv_heads;
  }
  new_rows_ += n;
  RETURN_IF_ERROR(
      backend_->Logits(hidden_.data() + (n - 1) * config_.hidden_size, 1, logits_.data()));
  RETURN_IF_CUDA_ERROR(
      kernels::ArgmaxCuda(logits_.data(), 1, config_.vocab_size, best_.data(), stream.get()));
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_best_.data(), best_.data(), sizeof(int32_t),
                                       cudaMemcpyDeviceToHost, stream.get()));
  return absl::OkStatus();
}

absl::Status CudaRepositionedPass::Logits(int64_t count, float* logits) {
  CARREL_CHECK(count <= n_);
  const cuda::Stream& stream = backend_->stream();
  for (int64_t at = 0; at < count; at += kLogitsTokens) {
    const int64_t n = std::min(kLogitsTokens, count - at);
    RETURN_IF_ERROR(backend_->Logits(hidden_.data() + (n_ - count + at) * config_.hidden_size, n,
                                     logits_.data()));
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_logits_.data(), logits_.data(),
                                         static_cast<size_t>(n * config_.vocab_size) * 4,
                                         cudaMemcpyDeviceToHost, stream.get()));
    RETURN_IF_ERROR(stream.Synchronize());
    std::copy_n(host_logits_.data(), n * config_.vocab_size, logits + at * config_.vocab_size);
  }
  return absl::OkStatus();
}

absl::StatusOr<TokenId> CudaRepositionedPass::Greedy() {
  RETURN_IF_ERROR(backend_->stream().Synchronize());
  if (*host_best_.data() < 0) return absl::InternalError("a logit is NaN");
  return *host_best_.data();
}

Statistics CudaRepositionedPass::statistics() const {
  Statistics statistics;
  statistics.layers = statistics_;
  for (size_t layer = 0; layer < budgets_.size(); ++layer) {
    statistics.layers[layer].selection = selections_[layer];
  }
  statistics.window_bytes = 2 * 2 * shape_.layers * int64_t{shape_.kv_heads} * shape_.head_dim *
                            (capacity_ - zone_.rows());
  statistics.weight_bytes = model::CudaWeights::Bytes(config_);
  statistics.device_bytes = CudaBackend::Bytes(config_, block_) + OwnBytes();
  return statistics;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ForwardPass>> MakeCudaRepositionedPass(
    const model::Checkpoint& checkpoint, const OpenedContext& context) {
  CARREL_CHECK(context.rows != nullptr && SelectorOf(context.config) != nullptr);
  auto pass = std::make_unique<CudaRepositionedPass>(checkpoint.config, context);
  RETURN_IF_ERROR(pass->Prepare(checkpoint, context));
  return pass;
}

}  // namespace carrel::decoder
