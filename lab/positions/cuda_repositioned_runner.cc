// What:   decoding on a GPU over a context whose keys are stored before RoPE, at positions that
//         attention gives: what RepositionedAttention (repositioned_attention.h) is on the CPU, with
//         method infinitehip. All rows of the context and all new ones lie in one array per layer and KV
//         head, on the device (DeviceZoneOptions) or in pinned memory of this host (HostZoneOptions), which
//         the kernels read, and the new rows' kernel writes, across the bus.
// Math:   that of repositioned_attention.h on keys that are rounded to bf16 once more after they are
//         turned; rows are the CPU's but for ties within that rounding.
// Source: InfiniteHiP (docs/methods.md). Every token is a block of its own to the kernels of sparse
//         prefill (kernels/select/block_prune, kernels/attention/block_sparse_attention).
//         A runner of one sequence: nothing is shared with others.
// Errors: Unimplemented a shape or stages that the kernels do not run (names them); those of runner.h.
// Ownership: copies the rows; keeps none of what it is given.
// Threads: one caller.
// Cost:   no graphs: some 20 launches per layer and token. Memory: 4 bytes * kv_heads * head_dim per
//         layer, token of the context and new token, and the scores of a block's first stage.
#include <algorithm>
#include <cstring>
#include <utility>

#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/cuda/range.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/runner/runner.h"
#include "decoder/select/host_rows.h"
#include "decoder/zone/zone_attention.h"
#include "kernels/attention/block_sparse_attention/block_sparse_attention.h"
#include "kernels/layer/rope/rope_table.h"
#include "kernels/of_heads.h"
#include "kernels/select/argmax/argmax_cuda.h"
#include "kernels/select/block_prune/block_prune.h"
#include "lab/methods/infinite_hip_selector.h"
#include "lab/methods/options.h"
#include "model/cuda_backend.h"
#include "model/device.h"

namespace carrel::decoder {
namespace {

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
    const int64_t wanted = stage.Wanted(budget);
    int64_t chunk = stage.chunk;
    while (chunk > wanted) chunk /= 2;
    stages.push_back({chunk, wanted, stage.refresh});
  }
  return stages;
}

class CudaRepositioned final : public Runner, public Sequence {
 public:
  CudaRepositioned(const model::ModelConfig& config, const OpenedContext& context)
      : Sequence(context.tokens),
        config_(config),
        shape_(config.shape),
        infinite_hip_(OptionsOf<InfiniteHipConfig>(*SelectorOf(context.config))),
        zone_(context.zone),
        context_tokens_(context.tokens),
        capacity_(context.tokens + context.device.new_tokens),
        in_host_(std::holds_alternative<HostZoneOptions>(context.config.zone)),
        width_(int64_t{shape_.q_heads} * shape_.head_dim),
        selections_(context.selections),
        budgets_(Budgets(selections_)),
        statistics_(shape_.layers) {}

  absl::Status Prepare(const model::Checkpoint& checkpoint, const OpenedContext& context);

  Runner& runner() override { return *this; }
  int64_t max_tokens() const override { return block_; }
  std::vector<SliceResult> Step(absl::Span<const Slice> batch) override;
  Statistics statistics() const override;

 private:
  void Start(int64_t give_up) override {
    CARREL_CHECK(give_up == 0);  // MostGivenUp
    std::fill(kept_.begin(), kept_.end(), false);
  }
  int64_t budget(Layer layer) const { return budgets_[static_cast<size_t>(layer.value())]; }
  bool takes_all(Layer layer) const {
    return budget(layer) == kAllRows || budget(layer) >= zone_.rows();
  }
  std::vector<Stage> StagesOfLayer(Layer layer) const {
    return takes_all(layer) ? std::vector<Stage>() : StagesOf(infinite_hip_, budget(layer));
  }
  int64_t row_elements() const { return int64_t{shape_.kv_heads} * capacity_ * shape_.head_dim; }
  kernels::KvRows kv(Layer layer) const {
    kernels::Bf16* const rows = in_host_ ? pinned_rows_.data() : memory_.rows;
    kernels::Bf16* const k = rows + layer.value() * 2 * row_elements();
    return {k, k + row_elements(), capacity_};
  }
  const kernels::ChosenRows& kept(Layer layer, size_t stage) const {
    return memory_.kept[static_cast<size_t>(layer.value()) * infinite_hip_.stages.size() + stage];
  }

  // What lies on the device beside the backend.
  struct Memory {
    kernels::Bf16* rows = nullptr;  // null: in pinned memory
    float *angles = nullptr, *hidden = nullptr, *logits = nullptr;
    int32_t *ids = nullptr, *best = nullptr;
    kernels::Bf16 *q = nullptr, *attended = nullptr, *right = nullptr, *left = nullptr;
    uint32_t* scores = nullptr;
    // Rows of units that were chosen.
    kernels::ChosenRows start;
    std::vector<kernels::ChosenRows> prompt;  // [stages], of a block of a prompt
    std::vector<kernels::ChosenRows> kept;    // [layers, stages], of a generated token
  };
  // Plans it, or lays it out.
  Memory Lay(cuda::DeviceArena& arena) const;

  absl::Status Run(const Slice& slice);
  absl::Status CopyLogits(int64_t n, int64_t count, float* logits);
  absl::Status Plan();
  absl::Status Allocate(const model::Checkpoint& checkpoint, ThreadPool* pool);
  absl::Status CopyRows(const HostRows& rows, ThreadPool* pool);
  int64_t OwnBytes() const {
    return cuda::DeviceArena::BytesOf([&](cuda::DeviceArena& arena) { Lay(arena); });
  }
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

  model::GpuReservation reserved_;
  std::unique_ptr<CudaBackend> backend_;
  cuda::DeviceArena arena_;
  Memory memory_;
  std::vector<bool> kept_;  // [layers]: there is something in memory_.kept
  PinnedBuffer<uint16_t> pinned_rows_;
  PinnedBuffer<int32_t> host_ids_, host_best_;
  PinnedBuffer<float> host_logits_;

  bool reading_prompt_ = false;
  int64_t generated_ = 0;  // since the prompt
};

absl::Status CudaRepositioned::Plan() {
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

CudaRepositioned::Memory CudaRepositioned::Lay(cuda::DeviceArena& arena) const {
  const auto list = [&](int64_t units, int64_t stride) {
    return kernels::ChosenRows{arena.Take<int32_t>(units * stride), stride,
                               arena.Take<kernels::ChosenRowsHead>(units)};
  };
  const int64_t units = block_ * shape_.kv_heads;
  Memory memory;
  memory.rows = arena.Take<kernels::Bf16>(in_host_ ? 0 : 2 * shape_.layers * row_elements());
  memory.angles = arena.Take<float>(config_.max_position_embeddings * shape_.head_dim);
  memory.hidden = arena.Take<float>(block_ * config_.hidden_size);
  memory.logits = arena.Take<float>(kLogitsTokens * config_.vocab_size);
  memory.ids = arena.Take<int32_t>(block_);
  memory.best = arena.Take<int32_t>(1);
  for (kernels::Bf16** rows : {&memory.q, &memory.attended, &memory.right, &memory.left})
    *rows = arena.Take<kernels::Bf16>(block_ * width_);
  memory.scores = arena.Take<uint32_t>(units * most_chunks_);
  memory.start = list(units, 1);
  for (const int64_t stretches : stretches_) memory.prompt.push_back(list(units, stretches));
  for (int32_t layer = 0; layer < shape_.layers; ++layer) {
    for (const int64_t stretches : stretches_)
      memory.kept.push_back(list(shape_.kv_heads, stretches));
  }
  return memory;
}

absl::Status CudaRepositioned::Allocate(const model::Checkpoint& checkpoint, ThreadPool* pool) {
  ASSIGN_OR_RETURN(backend_, CudaBackend::Create(config_, checkpoint.weights, block_, pool,
                                                 checkpoint.adapter, Rope::kInfiniteHip));
  ASSIGN_OR_RETURN(arena_,
                   cuda::DeviceArena::Of([&](cuda::DeviceArena& arena) { memory_ = Lay(arena); }));
  if (in_host_) {
    ASSIGN_OR_RETURN(pinned_rows_,
                     PinnedBuffer<uint16_t>::Create(2 * shape_.layers * row_elements()));
  }
  const kernels::RopeTable table(model::RopeInvFreq(config_.rope, shape_.head_dim),
                                 config_.max_position_embeddings);
  RETURN_IF_CUDA_ERROR(cudaMemcpy(memory_.angles, table.angles().data(),
                                  table.angles().size() * sizeof(float), cudaMemcpyHostToDevice));
  ASSIGN_OR_RETURN(host_ids_, PinnedBuffer<int32_t>::Create(block_));
  ASSIGN_OR_RETURN(host_best_, PinnedBuffer<int32_t>::Create(1));
  ASSIGN_OR_RETURN(host_logits_, PinnedBuffer<float>::Create(kLogitsTokens * config_.vocab_size));
  kept_.assign(static_cast<size_t>(shape_.layers), false);
  return absl::OkStatus();
}

absl::Status CudaRepositioned::CopyRows(const HostRows& rows, ThreadPool* pool) {
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

absl::Status CudaRepositioned::Prepare(const model::Checkpoint& checkpoint,
                                       const OpenedContext& context) {
  RETURN_IF_ERROR(CudaBackend::Check(config_));
  if (shape_.head_dim != 64 && shape_.head_dim != 128) {
    return absl::UnimplementedError(
        absl::StrCat("device cuda: decoding needs head_dim 64 or 128; the model has head_dim=",
                     shape_.head_dim));
  }
  RETURN_IF_ERROR(Plan());
  const int64_t own = CudaBackend::ScratchBytes(config_, block_) + OwnBytes();
  const int64_t weights =
      model::CudaWeights::SharedBytes(config_, checkpoint.weights, checkpoint.adapter);
  RETURN_IF_ERROR(model::CheckGpuMemory(model::GpuReservation::all() + weights + own,
                                        context.device.gpu_memory));
  reserved_ = model::GpuReservation(own);
  RETURN_IF_ERROR(Allocate(checkpoint, context.pool));
  return Annotate(CopyRows(*context.rows, context.pool), "copying rows of the context");
}

absl::Status CudaRepositioned::GatherQueries(Layer layer, const kernels::BlockLayout& layout,
                                             const uint16_t* q) {
  const bool relative = layer.value() >= model::kChunkIndexedLayers;
  auto params = kernels::OfHeads<kernels::BlockQueriesParams>(shape_);
  params.layout = layout;
  params.q = q;
  params.stride_q = 1;
  if (relative) params.table = {memory_.angles, config_.max_position_embeddings};
  params.right = memory_.right;
  params.left = relative ? memory_.left : nullptr;
  RETURN_IF_CUDA_ERROR(kernels::GatherBlockQueries(params, backend_->stream().get()));
  return absl::OkStatus();
}

absl::Status CudaRepositioned::Choose(Layer layer, const kernels::BlockLayout& layout,
                                      const uint16_t* q, kernels::ChosenRows* chosen) {
  const cudaStream_t stream = backend_->stream().get();
  RETURN_IF_CUDA_ERROR(kernels::StartBlockPrune(layout, shape_.kv_heads, memory_.start, stream));
  *chosen = memory_.start;
  const std::vector<Stage> stages = StagesOfLayer(layer);
  if (stages.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(GatherQueries(layer, layout, q));
  const bool relative = layer.value() >= model::kChunkIndexedLayers;
  auto prune = kernels::OfHeads<kernels::BlockPruneParams>(shape_);
  prune.layout = layout;
  prune.right = memory_.right;
  prune.left = relative ? memory_.left : nullptr;
  prune.queries = shape_.group();
  prune.kv = kv(layer);
  if (!relative) prune.table = {memory_.angles, config_.max_position_embeddings};
  prune.max_rows = zone_.rows();
  prune.scores = memory_.scores;
  bool changed = reading_prompt_ || !kept_[static_cast<size_t>(layer.value())];
  for (size_t i = 0; i < stages.size(); ++i) {
    const Stage& stage = stages[i];
    changed = changed || generated_ % stage.refresh == 0;
    if (prune.max_rows <= stage.wanted) continue;  // all goes on
    prune.in = *chosen;
    prune.out = reading_prompt_ ? memory_.prompt[i] : kept(layer, i);
    prune.chunk = stage.chunk;
    prune.wanted = stage.wanted;
    if (changed) RETURN_IF_CUDA_ERROR(kernels::BlockPrune(prune, stream));
    prune.max_rows = stage.wanted;
    *chosen = prune.out;
  }
  if (!reading_prompt_) kept_[static_cast<size_t>(layer.value())] = true;
  return absl::OkStatus();
}

absl::Status CudaRepositioned::Attend(Layer layer, int64_t first, int64_t n) {
  auto attend = kernels::OfHeads<kernels::BlockSparseAttentionParams>(shape_);
  attend.layout.first_position = end() + first;
  attend.layout.n = n;
  attend.layout.block_q = 1;
  attend.layout.sink_tokens = zone_.begin;
  attend.layout.zone_limit = zone_.end;
  attend.q = memory_.q + first * width_;
  RETURN_IF_ERROR(Choose(layer, attend.layout, attend.q, &attend.chosen));
  attend.kv = kv(layer);
  attend.table = {memory_.angles, config_.max_position_embeddings};
  attend.out = memory_.attended + first * width_;
  RETURN_IF_CUDA_ERROR(kernels::BlockSparseAttention(attend, backend_->stream().get()));
  return absl::OkStatus();
}

std::vector<SliceResult> CudaRepositioned::Step(absl::Span<const Slice> batch) {
  std::vector<SliceResult> results(batch.size());
  for (size_t i = 0; i < batch.size(); ++i) {
    const Slice& slice = batch[i];
    SliceResult& result = results[i];
    CARREL_CHECK(slice.sequence == this);
    const auto n = static_cast<int64_t>(slice.tokens.size());
    result.status = Run(slice);
    if (result.status.ok()) result.status = backend_->stream().Synchronize();
    if (!result.status.ok()) continue;
    if (*host_best_.data() >= 0) {
      result.next = *host_best_.data();
    } else if (slice.wants_next) {
      result.next = absl::InternalError("a logit is NaN");
    }
    if (slice.all_logits != nullptr) result.status = CopyLogits(n, n, slice.all_logits);
    if (result.status.ok() && slice.next_logits != nullptr) {
      result.status = CopyLogits(n, 1, slice.next_logits);
    }
    if (result.status.ok()) Took(slice.tokens);
  }
  return results;
}

absl::Status CudaRepositioned::Run(const Slice& slice) {
  const cuda::Range range("step");
  RETURN_IF_ERROR(CheckWanted());
  const absl::Span<const TokenId> tokens = slice.tokens;
  const auto n = static_cast<int64_t>(tokens.size());
  CARREL_CHECK(n >= 1 && n <= block_);
  for (TokenId token : tokens) {
    if (token >= 0 && token < config_.vocab_size) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "token id ", token, " is outside the vocabulary [0, ", config_.vocab_size, ")"));
  }
  if (end() + n > capacity_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there is room for ", capacity_ - context_tokens_,
                     " new tokens (gpu_new_tokens); ", end() + n - context_tokens_, " are needed"));
  }
  reading_prompt_ = slice.of_prompt;
  if (reading_prompt_) generated_ = 0;
  const cuda::Stream& stream = backend_->stream();
  std::copy(tokens.begin(), tokens.end(), host_ids_.data());
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(memory_.ids, host_ids_.data(),
                                       static_cast<size_t>(n) * sizeof(int32_t),
                                       cudaMemcpyHostToDevice, stream.get()));
  RETURN_IF_ERROR(backend_->Embed(memory_.ids, n, memory_.hidden));
  const int64_t generated = generated_;
  for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
    model::CudaPlacement placement;
    placement.first_row = end();
    placement.kv = kv(layer);
    RETURN_IF_ERROR(backend_->ProjectQkv(layer, memory_.hidden, n, placement, memory_.q, nullptr));
    if (reading_prompt_) {
      RETURN_IF_ERROR(Attend(layer, 0, n));
    } else {
      // One after the other: what one chose serves the next.
      generated_ = generated;
      for (int64_t i = 0; i < n; ++i, ++generated_) RETURN_IF_ERROR(Attend(layer, i, 1));
    }
    RETURN_IF_ERROR(backend_->FinishLayer(layer, memory_.attended, n, memory_.hidden));
    LayerStatistics& statistics = statistics_[static_cast<size_t>(layer.value())];
    const int64_t attended = takes_all(layer) ? zone_.rows() : budget(layer);
    statistics.tokens += n;
    statistics.rows_attended += n * attended * shape_.kv_heads;
  }
  RETURN_IF_ERROR(
      backend_->Logits(memory_.hidden + (n - 1) * config_.hidden_size, 1, memory_.logits));
  RETURN_IF_CUDA_ERROR(
      kernels::ArgmaxCuda(memory_.logits, 1, config_.vocab_size, memory_.best, stream.get()));
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_best_.data(), memory_.best, sizeof(int32_t),
                                       cudaMemcpyDeviceToHost, stream.get()));
  return absl::OkStatus();
}

// Of the last `count` of the n tokens that were run.
absl::Status CudaRepositioned::CopyLogits(int64_t n, int64_t count, float* logits) {
  const cuda::Stream& stream = backend_->stream();
  for (int64_t at = 0; at < count; at += kLogitsTokens) {
    const int64_t rows = std::min(kLogitsTokens, count - at);
    RETURN_IF_ERROR(backend_->Logits(memory_.hidden + (n - count + at) * config_.hidden_size, rows,
                                     memory_.logits));
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_logits_.data(), memory_.logits,
                                         static_cast<size_t>(rows * config_.vocab_size) * 4,
                                         cudaMemcpyDeviceToHost, stream.get()));
    RETURN_IF_ERROR(stream.Synchronize());
    std::copy_n(host_logits_.data(), rows * config_.vocab_size, logits + at * config_.vocab_size);
  }
  return absl::OkStatus();
}

Statistics CudaRepositioned::statistics() const {
  Statistics statistics;
  statistics.layers = statistics_;
  for (size_t layer = 0; layer < budgets_.size(); ++layer) {
    statistics.layers[layer].selection = selections_[layer];
  }
  statistics.window_bytes = 2 * 2 * shape_.layers * int64_t{shape_.kv_heads} * shape_.head_dim *
                            (capacity_ - zone_.rows());
  statistics.weight_bytes = statistics.shared_bytes = model::CudaWeights::Bytes(config_);
  statistics.device_bytes = CudaBackend::Bytes(config_, block_) + OwnBytes();
  return statistics;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Sequence>> OpenCudaRepositioned(const model::Checkpoint& checkpoint,
                                                               const OpenedContext& context) {
  CARREL_CHECK(context.rows != nullptr && SelectorOf(context.config) != nullptr);
  auto sequence = std::make_unique<CudaRepositioned>(checkpoint.config, context);
  RETURN_IF_ERROR(sequence->Prepare(checkpoint, context));
  return sequence;
}

}  // namespace carrel::decoder
