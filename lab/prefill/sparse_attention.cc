#include "prefill/sparse_attention.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/attention/prefill_attention/prefill_attention.h"
#include "kernels/layer/rope/rope_table.h"
#include "kernels/of_heads.h"
#include "kernels/score/max_score/max_score.h"
#include "kernels/select/chunk_prune/chunk_prune.h"
#include "lab/prefill/sparse_stages.h"

namespace carrel::prefill {
namespace {

class SparseAttention final : public LayerAttention {
 public:
  SparseAttention(const AttentionConfig& config, const AttentionShape& shape, int64_t tokens,
                  std::vector<Position> sample_positions, std::vector<float> undo_rope,
                  const std::vector<float>& inv_freq, int64_t trained_tokens, ThreadPool* pool);

 private:
  struct Block;

  void AttendBlock(const model::AttentionInput& input, float* attended) override;
  void AttendUnit(const model::AttentionInput& input, const Block& block, float* attended) const;
  std::vector<RowRange> Choose(const model::AttentionInput& input, const Block& block,
                               RowRange candidates) const;

  const AttentionConfig config_;
  const bool moved_;  // rope infinitehip
  const kernels::RopeTable rope_;
};

// Tokens [first, first + n) of one KV head; `offset` is the first one's index in the input.
struct SparseAttention::Block {
  int64_t kv_head = 0;
  int64_t offset = 0;
  Position first = 0;
  int64_t n = 0;
};

SparseAttention::SparseAttention(const AttentionConfig& config, const AttentionShape& shape,
                                 int64_t tokens, std::vector<Position> sample_positions,
                                 std::vector<float> undo_rope, const std::vector<float>& inv_freq,
                                 int64_t trained_tokens, ThreadPool* pool)
    : LayerAttention(shape, tokens, std::move(sample_positions), std::move(undo_rope), pool),
      config_(config),
      moved_(config.rope == model::Rope::kInfiniteHip),
      rope_(inv_freq, moved_ ? trained_tokens : 1) {}

void SparseAttention::AttendBlock(const model::AttentionInput& input, float* attended) {
  // Blocks lie at multiples of block_q from position 0, whatever the input, so that a token's block
  // does not depend on how the document is passed; the input begins at such a multiple.
  std::vector<Block> blocks;
  const Position end = input.first_position + input.n;
  for (Position first = input.first_position; first < end;) {
    const Position next = std::min(end, (first / config_.block_q + 1) * config_.block_q);
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      blocks.push_back({head, first - input.first_position, first, next - first});
    }
    first = next;
  }
  pool_->ParallelFor(static_cast<int64_t>(blocks.size()), [&](int64_t i) {
    AttendUnit(input, blocks[static_cast<size_t>(i)], attended);
  });
}

std::vector<RowRange> SparseAttention::Choose(const model::AttentionInput& input,
                                              const Block& block, RowRange candidates) const {
  if (candidates.rows() <= config_.rows) return {candidates};
  const int64_t d = shape_.head_dim, group = shape_.group();
  // Of the block's last token and every stride_q-th before it.
  std::vector<float> queries;
  for (int64_t i = block.n - 1; i >= 0; i -= config_.stride_q) {
    const float* of_token =
        input.q + ((block.offset + i) * shape_.q_heads + block.kv_head * group) * d;
    queries.insert(queries.end(), of_token, of_token + group * d);
  }
  const auto count = static_cast<int64_t>(queries.size()) / d;
  const int64_t stream = block.first - candidates.end + 1;
  const bool chunk_indexed = input.layer.value() < model::kChunkIndexedLayers;
  // Relative-style positions are two only: the queries are turned instead of the keys.
  std::optional<kernels::QueryPanels> right, left;
  if (moved_ && !chunk_indexed) {
    std::vector<float> turned(queries.size());
    const auto turn = [&](int64_t distance) {
      for (int64_t i = 0; i < count; ++i) rope_.Turn(&queries[i * d], distance, &turned[i * d]);
    };
    turn(stream);
    right.emplace(turned.data(), count, d);
    turn(stream + 1);
    left.emplace(turned.data(), count, d);
  } else {
    right.emplace(queries.data(), count, d);
  }
  const float* keys = k(block.kv_head);
  std::vector<float> gathered, of_side;
  std::vector<size_t> side;
  const auto score = [&](absl::Span<const kernels::ChunkProbe> probes, std::vector<float>& scores) {
    gathered.resize(probes.size() * static_cast<size_t>(d));
    const auto gather = [&](size_t to, const kernels::ChunkProbe& probe) {
      std::copy_n(keys + probe.row * d, d, &gathered[to * static_cast<size_t>(d)]);
    };
    if (!left.has_value()) {
      for (size_t i = 0; i < probes.size(); ++i) {
        float* key = &gathered[i * static_cast<size_t>(d)];
        if (moved_) {
          rope_.TurnBack(keys + probes[i].row * d, stream + probes[i].chunks_back, key);
        } else {
          gather(i, probes[i]);
        }
      }
      kernels::MaxScore(*right, gathered.data(), static_cast<int64_t>(probes.size()),
                        scores.data());
      return;
    }
    for (const bool is_right : {true, false}) {
      side.clear();
      for (size_t i = 0; i < probes.size(); ++i) {
        if (probes[i].right != is_right) continue;
        gather(side.size(), probes[i]);
        side.push_back(i);
      }
      of_side.resize(side.size());
      kernels::MaxScore(is_right ? *right : *left, gathered.data(),
                        static_cast<int64_t>(side.size()), of_side.data());
      for (size_t i = 0; i < side.size(); ++i) scores[side[i]] = of_side[i];
    }
  };
  if (config_.kind == AttentionKind::kInfiniteHip) {
    std::vector<RowRange> kept = {candidates};
    for (const SparseStage& stage : SparseStages(config_.rows)) {
      kept = kernels::KeepBestChunks(kept, stage.chunk, stage.survivors, score);
    }
    return kept;
  }
  const int64_t block_k = config_.block_k;
  std::vector<RowRange> kept;
  for (const kernels::ScoredBlock& found :
       kernels::HalveChunks(candidates, block_k, std::max<int64_t>(1, config_.rows / block_k),
                            kernels::MiddleBlock, score)) {
    kept.push_back(kernels::RowsOfBlock(candidates, block_k, found.block));
  }
  return kept;
}

void SparseAttention::AttendUnit(const model::AttentionInput& input, const Block& block,
                                 float* attended) const {
  thread_local std::vector<float> keys, values, queries, scratch;
  const int64_t d = shape_.head_dim, group = shape_.group();
  const Position sink = std::min(config_.sink, block.first);
  const Position zone_end = std::max(sink, block.first - config_.window);
  std::vector<RowRange> ranges = {{0, sink}};
  for (const RowRange& range : Choose(input, block, {sink, zone_end})) ranges.push_back(range);
  ranges.push_back({zone_end, block.first + block.n});
  int64_t rows = 0;
  for (const RowRange& range : ranges) rows += range.rows();
  keys.resize(static_cast<size_t>(rows * d));
  values.resize(keys.size());
  int64_t rank = 0;
  for (const RowRange& range : ranges) {
    std::copy_n(v(block.kv_head) + range.begin * d, range.rows() * d, &values[rank * d]);
    if (!moved_) {
      std::copy_n(k(block.kv_head) + range.begin * d, range.rows() * d, &keys[rank * d]);
      rank += range.rows();
      continue;
    }
    for (Position row = range.begin; row < range.end; ++row, ++rank) {
      rope_.Turn(k(block.kv_head) + row * d, rank, &keys[rank * d]);
    }
  }
  const int64_t stride = int64_t{shape_.q_heads} * d;
  scratch.resize(static_cast<size_t>(kernels::PrefillAttentionScratchFloats(d)));
  queries.resize(static_cast<size_t>(block.n * d));
  for (int64_t h = 0; h < group; ++h) {
    const int64_t at = block.offset * stride + (block.kv_head * group + h) * d;
    auto params = kernels::OfHeads<kernels::PrefillAttentionParams>(shape_);
    params.q = input.q + at;
    params.q_stride = stride;
    if (moved_) {
      for (int64_t i = 0; i < block.n; ++i) {
        rope_.Turn(input.q + at + i * stride, rows - block.n + i, &queries[i * d]);
      }
      params.q = queries.data();
      params.q_stride = d;
    }
    params.n = block.n;
    params.first_position = rows - block.n;
    params.k = keys.data();
    params.v = values.data();
    params.out = attended + at;
    params.out_stride = stride;
    kernels::PrefillAttention(params, scratch.data());
  }
}

}  // namespace

std::unique_ptr<LayerAttention> MakeSparseAttention(const AttentionConfig& config,
                                                    const AttentionShape& shape, int64_t tokens,
                                                    std::vector<Position> sample_positions,
                                                    std::vector<float> undo_rope,
                                                    const std::vector<float>& inv_freq,
                                                    int64_t trained_tokens, ThreadPool* pool) {
  return std::make_unique<SparseAttention>(config, shape, tokens, std::move(sample_positions),
                                           std::move(undo_rope), inv_freq, trained_tokens, pool);
}

}  // namespace carrel::prefill
