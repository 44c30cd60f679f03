#include "prefill/cuda_sparse_attention.h"

#include <algorithm>
#include <utility>

#include "common/cuda/arena.h"
#include "common/cuda/range.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "kernels/attention/block_sparse_attention/block_sparse_attention.h"
#include "kernels/block_layout.h"
#include "kernels/layer/rope/rope_table.h"
#include "kernels/of_heads.h"
#include "kernels/select/block_prune/block_prune.h"
#include "lab/prefill/sparse_stages.h"

namespace carrel::prefill {
namespace {

constexpr int64_t kMostQueries = 256;  // of a block and KV head that are asked

// Stretches of rows that may go on from a stage.
int64_t MostStretches(const AttentionConfig& config) {
  int64_t most = 1;
  for (const SparseStage& stage : SparseStages(config.rows)) {
    most = std::max(most, stage.survivors / stage.chunk);
  }
  return most;
}

// Chunks that a unit may have in any stage.
int64_t MostChunks(const AttentionConfig& config, int64_t tokens) {
  int64_t most = 1, rows = tokens;
  for (const SparseStage& stage : SparseStages(config.rows)) {
    most = std::max(most, (rows + stage.chunk - 1) / stage.chunk);
    rows = std::min(rows, stage.survivors);
  }
  return most;
}

class BlockSparse final : public CudaSparseAttention {
 public:
  // Lays its memory out.
  BlockSparse(const AttentionConfig& config, const model::ModelConfig& model, int64_t tokens,
              int64_t chunk, cuda::DeviceArena& arena);
  absl::Status Load(const model::ModelConfig& model, cuda::DeviceArena arena);
  absl::Status Attend(Layer layer, const kernels::Bf16* q, const kernels::KvView& kv,
                      Position first, int64_t n, kernels::Bf16* out,
                      const cuda::Stream& stream) override;

 private:
  absl::Status Choose(Layer layer, const kernels::Bf16* q, const kernels::KvView& kv,
                      const kernels::BlockLayout& layout, const cuda::Stream& stream,
                      kernels::ChosenRows* chosen);
  kernels::TurnTable Table() const { return {angles_, positions_}; }

  const AttentionConfig config_;
  const AttentionShape shape_;
  const int64_t positions_;  // of the table; 0: keys stand where they are
  const int64_t stretches_;  // that a unit may have
  cuda::DeviceArena arena_;
  float* angles_ = nullptr;
  kernels::Bf16 *right_ = nullptr, *left_ = nullptr;
  uint32_t* scores_ = nullptr;
  kernels::ChosenRows lists_[2];
};

}  // namespace

absl::Status CudaSparseAttention::Check(const AttentionConfig& config,
                                        const AttentionShape& shape) {
  if (config.kind != AttentionKind::kInfiniteHip) {
    return absl::UnimplementedError(
        absl::StrCat("device cuda: attention=", AttentionText(config), " runs on the CPU only"));
  }
  if (shape.head_dim != 64 && shape.head_dim != 128) {
    return absl::UnimplementedError(absl::StrCat(
        "device cuda: attention infinitehip: head_dim=", shape.head_dim, " is none of 64, 128"));
  }
  const int64_t queries = kernels::BlockQueries(config.block_q, config.stride_q, shape.group());
  if (queries > kMostQueries) {
    return absl::UnimplementedError(absl::StrCat(
        "device cuda: attention infinitehip: block_q=", config.block_q, " and stride_q=",
        config.stride_q, " ask with ", queries, " queries, more than ", kMostQueries));
  }
  return absl::OkStatus();
}

int64_t CudaSparseAttention::Bytes(const AttentionConfig& config, const model::ModelConfig& model,
                                   int64_t tokens, int64_t chunk) {
  return cuda::DeviceArena::BytesOf(
      [&](cuda::DeviceArena& arena) { BlockSparse(config, model, tokens, chunk, arena); });
}

BlockSparse::BlockSparse(const AttentionConfig& config, const model::ModelConfig& model,
                         int64_t tokens, int64_t chunk, cuda::DeviceArena& arena)
    : config_(config),
      shape_(model.shape),
      positions_(config.rope == model::Rope::kInfiniteHip ? model.max_position_embeddings : 0),
      stretches_(MostStretches(config)) {
  CARREL_CHECK(tokens > 0);
  const int64_t units =
      (std::min(tokens, chunk) + config.block_q - 1) / config.block_q * shape_.kv_heads;
  const int64_t queries =
      units * kernels::BlockQueries(config.block_q, config.stride_q, shape_.group());
  angles_ = arena.Take<float>(positions_ * shape_.head_dim);
  right_ = arena.Take<kernels::Bf16>(queries * shape_.head_dim);
  left_ = arena.Take<kernels::Bf16>(queries * shape_.head_dim);
  scores_ = arena.Take<uint32_t>(units * MostChunks(config, tokens));
  for (kernels::ChosenRows& list : lists_) {
    list = {arena.Take<int32_t>(units * stretches_), stretches_,
            arena.Take<kernels::ChosenRowsHead>(units)};
  }
}

absl::StatusOr<std::unique_ptr<CudaSparseAttention>> CudaSparseAttention::Create(
    const AttentionConfig& config, const model::ModelConfig& model, int64_t tokens, int64_t chunk) {
  RETURN_IF_ERROR(Check(config, model.shape));
  CARREL_CHECK(chunk % config.block_q == 0 || chunk == tokens);
  std::unique_ptr<BlockSparse> attention;
  ASSIGN_OR_RETURN(cuda::DeviceArena arena, cuda::DeviceArena::Of([&](cuda::DeviceArena& laid) {
                     attention.reset(new BlockSparse(config, model, tokens, chunk, laid));
                   }));
  RETURN_IF_ERROR(attention->Load(model, std::move(arena)));
  return attention;
}

absl::Status BlockSparse::Load(const model::ModelConfig& model, cuda::DeviceArena arena) {
  arena_ = std::move(arena);
  if (positions_ == 0) return absl::OkStatus();
  const kernels::RopeTable table(model::RopeInvFreq(model.rope, model.shape.head_dim),
                                 model.max_position_embeddings);
  RETURN_IF_CUDA_ERROR(cudaMemcpy(angles_, table.angles().data(),
                                  table.angles().size() * sizeof(float), cudaMemcpyHostToDevice));
  return absl::OkStatus();
}

absl::Status BlockSparse::Choose(Layer layer, const kernels::Bf16* q, const kernels::KvView& kv,
                                 const kernels::BlockLayout& layout, const cuda::Stream& stream,
                                 kernels::ChosenRows* chosen) {
  const bool moved = positions_ > 0;
  const bool chunk_indexed = moved && layer.value() < model::kChunkIndexedLayers;
  const bool relative = moved && !chunk_indexed;
  auto gather = kernels::OfHeads<kernels::BlockQueriesParams>(shape_);
  gather.layout = layout;
  gather.q = q;
  gather.stride_q = config_.stride_q;
  if (relative) gather.table = Table();
  gather.right = right_;
  gather.left = relative ? left_ : nullptr;
  RETURN_IF_CUDA_ERROR(kernels::GatherBlockQueries(gather, stream.get()));

  int at = 0;
  RETURN_IF_CUDA_ERROR(kernels::StartBlockPrune(layout, shape_.kv_heads, lists_[at], stream.get()));
  auto prune = kernels::OfHeads<kernels::BlockPruneParams>(shape_);
  prune.layout = layout;
  prune.right = right_;
  prune.left = gather.left;
  prune.queries = kernels::BlockQueries(config_.block_q, config_.stride_q, shape_.group());
  prune.kv = kv;
  if (chunk_indexed) prune.table = Table();
  prune.max_rows = layout.zone_rows(layout.blocks() - 1);
  prune.scores = scores_;
  for (const SparseStage& stage : SparseStages(config_.rows)) {
    if (prune.max_rows <= stage.survivors) continue;  // all of every block goes on
    prune.in = lists_[at];
    prune.out = lists_[at = 1 - at];
    prune.chunk = stage.chunk;
    prune.wanted = stage.survivors;
    RETURN_IF_CUDA_ERROR(kernels::BlockPrune(prune, stream.get()));
    prune.max_rows = stage.survivors;
  }
  *chosen = lists_[at];
  return absl::OkStatus();
}

absl::Status BlockSparse::Attend(Layer layer, const kernels::Bf16* q, const kernels::KvView& kv,
                                 Position first, int64_t n, kernels::Bf16* out,
                                 const cuda::Stream& stream) {
  const cuda::Range range("prefill sparse attention");
  auto attend = kernels::OfHeads<kernels::BlockSparseAttentionParams>(shape_);
  attend.layout.first_position = first;
  attend.layout.n = n;
  attend.layout.block_q = config_.block_q;
  attend.layout.sink_tokens = config_.sink;
  attend.layout.window = config_.window;
  RETURN_IF_ERROR(Choose(layer, q, kv, attend.layout, stream, &attend.chosen));
  attend.q = q;
  attend.kv = kv;
  if (positions_ > 0) attend.table = Table();
  attend.out = out;
  RETURN_IF_CUDA_ERROR(kernels::BlockSparseAttention(attend, stream.get()));
  return absl::OkStatus();
}

}  // namespace carrel::prefill
