#include "decoder/refine/infinite_hip_refiner.h"

#include <algorithm>

#include "decoder/refine/key_scores.h"

namespace carrel::decoder {
namespace {

class InfiniteHipRefiner final : public Refiner {
 public:
  InfiniteHipRefiner(const InfiniteHipConfig& config, const AttentionShape& shape, RowRange zone,
                     const HostRows& rows)
      : config_(config),
        shape_(shape),
        zone_(zone),
        rows_(rows),
        cached_(static_cast<size_t>(shape.layers) * shape.kv_heads) {}

  int64_t block_tokens() const override { return config_.block_q; }
  void StartSequence() override {
    for (Survivors& survivors : cached_) survivors.clear();
  }

  void Select(const RefineRequest& request, Selection& selection) override {
    if (request.budget >= zone_.rows()) return AllRows(zone_, selection.rows);
    Survivors& cached = cached_[static_cast<size_t>(request.layer.value()) * shape_.kv_heads +
                                request.head.value()];
    const bool fresh = request.step == kPromptStep || cached.empty();
    Survivors stages(config_.stages.size());
    std::vector<RowRange> candidates = {zone_};
    bool changed = fresh;
    for (size_t i = 0; i < config_.stages.size(); ++i) {
      const InfiniteHipStage& stage = config_.stages[i];
      changed = changed || request.step % stage.refresh == 0;
      stages[i] = changed ? Prune(request, stage, candidates, selection) : cached[i];
      candidates = stages[i];
    }
    if (request.step != kPromptStep) cached = std::move(stages);
    selection.rows.clear();
    for (const RowRange& range : candidates) {
      for (Position row = range.begin; row < range.end; ++row) selection.rows.push_back(row);
    }
  }

 private:
  using Survivors = std::vector<std::vector<RowRange>>;  // [stages]

  std::vector<RowRange> Prune(const RefineRequest& request, const InfiniteHipStage& stage,
                              const std::vector<RowRange>& candidates, Selection& selection) const {
    int64_t wanted = stage.survivors;
    if (stage.multiple > 0) wanted = stage.multiple * request.budget;
    // A later stage can only keep what an earlier one let through.
    wanted = std::max(wanted, request.budget);
    int64_t rows = 0;
    for (const RowRange& range : candidates) rows += range.rows();
    if (rows <= wanted) return candidates;
    int64_t length = stage.chunk;
    while (length > wanted) length /= 2;
    std::vector<RowRange> chunks;
    for (const RowRange& range : candidates) {
      for (Position at = range.begin; at < range.end; at += length) {
        chunks.push_back({at, std::min(range.end, at + length)});
      }
    }
    std::vector<RowRange> kept;
    for (const int64_t i :
         BestIndices(Representatives(request, chunks, selection), wanted / length)) {
      kept.push_back(chunks[static_cast<size_t>(i)]);
    }
    return kept;
  }

  // The score of each chunk's representative. All chunks descend in step: one batch of keys a
  // level.
  std::vector<float> Representatives(const RefineRequest& request,
                                     const std::vector<RowRange>& chunks,
                                     Selection& selection) const {
    const HeadRows& rows = rows_.At(request.layer, request.head);
    std::vector<RowRange> left = chunks;
    std::vector<float> best(chunks.size()), scores;
    std::vector<size_t> open;
    for (size_t i = 0; i < chunks.size(); ++i) open.push_back(i);
    std::vector<Position> keys;
    for (size_t i = 0; i < chunks.size(); ++i) {  // chunks of one row are their own representative
      if (chunks[i].rows() == 1) keys.push_back(chunks[i].begin);
    }
    if (!keys.empty()) {
      MaxScores(request, rows, shape_.head_dim, keys, scores, selection);
      for (size_t i = 0, at = 0; i < chunks.size(); ++i) {
        if (chunks[i].rows() == 1) best[i] = scores[at++];
      }
    }
    while (true) {
      std::erase_if(open, [&](size_t i) { return left[i].rows() == 1; });
      if (open.empty()) return best;
      keys.clear();
      for (const size_t i : open) {
        const Position middle = (left[i].begin + left[i].end) / 2;
        keys.push_back((left[i].begin + middle) / 2);
        keys.push_back((middle + left[i].end) / 2);
      }
      MaxScores(request, rows, shape_.head_dim, keys, scores, selection);
      for (size_t j = 0; j < open.size(); ++j) {
        RowRange& range = left[open[j]];
        const Position middle = (range.begin + range.end) / 2;
        const bool right = scores[2 * j + 1] > scores[2 * j];
        best[open[j]] = scores[2 * j + (right ? 1 : 0)];
        range = right ? RowRange{middle, range.end} : RowRange{range.begin, middle};
      }
    }
  }

  const InfiniteHipConfig config_;
  const AttentionShape shape_;
  const RowRange zone_;
  const HostRows& rows_;
  std::vector<Survivors> cached_;  // [layers, kv_heads]
};

}  // namespace

std::unique_ptr<Refiner> MakeInfiniteHipRefiner(const InfiniteHipConfig& config,
                                                const AttentionShape& shape, RowRange zone,
                                                const HostRows& rows) {
  return std::make_unique<InfiniteHipRefiner>(config, shape, zone, rows);
}

}  // namespace carrel::decoder
