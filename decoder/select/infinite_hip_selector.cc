#include "decoder/select/infinite_hip_selector.h"

#include <algorithm>

#include "decoder/select/key_scores.h"
#include "kernels/select/chunk_prune/chunk_prune.h"

namespace carrel::decoder {
namespace {

class InfiniteHipSelector final : public RowSelector {
 public:
  InfiniteHipSelector(const InfiniteHipConfig& config, const AttentionShape& shape, RowRange zone,
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

  void Select(const SelectRequest& request, SelectedRows& selection) override {
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

  std::vector<RowRange> Prune(const SelectRequest& request, const InfiniteHipStage& stage,
                              const std::vector<RowRange>& candidates,
                              SelectedRows& selection) const {
    int64_t wanted = stage.survivors;
    if (stage.multiple > 0) wanted = stage.multiple * request.budget;
    // A later stage can only keep what an earlier one let through.
    wanted = std::max(wanted, request.budget);
    return kernels::KeepBestChunks(
        candidates, stage.chunk, wanted,
        [&](absl::Span<const kernels::ChunkProbe> probes, std::vector<float>& scores) {
          ScoreProbes(request, rows_.At(request.layer, request.head), shape_.head_dim, probes,
                      scores, selection);
        });
  }

  const InfiniteHipConfig config_;
  const AttentionShape shape_;
  const RowRange zone_;
  const HostRows& rows_;
  std::vector<Survivors> cached_;  // [layers, kv_heads]
};

}  // namespace

std::unique_ptr<RowSelector> MakeInfiniteHipSelector(const InfiniteHipConfig& config,
                                                     const AttentionShape& shape, RowRange zone,
                                                     const HostRows& rows) {
  return std::make_unique<InfiniteHipSelector>(config, shape, zone, rows);
}

}  // namespace carrel::decoder
