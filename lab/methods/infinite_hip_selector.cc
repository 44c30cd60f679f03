#include "lab/methods/infinite_hip_selector.h"

#include <algorithm>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/status.h"
#include "decoder/select/key_scores.h"
#include "decoder/select/method_type.h"
#include "decoder/select/row_selector.h"
#include "kernels/select/chunk_prune/chunk_prune.h"
#include "lab/methods/options.h"

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
    return kernels::KeepBestChunks(
        candidates, stage.chunk, stage.Wanted(request.budget),
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

struct Presets {
  std::vector<int64_t> refresh = {16, 8, 4};
  bool scaled = false;
};

// "CHUNK:SURVIVORS:REFRESH" of each stage, joined by "/"; survivors in tokens, or "Nx" budgets.
absl::Status ParseStages(absl::string_view text, std::vector<InfiniteHipStage>& stages) {
  constexpr absl::string_view kWanted =
      "stages CHUNK:SURVIVORS:REFRESH/.., survivors a number or Nx, the last 1x";
  stages.clear();
  for (absl::string_view one : absl::StrSplit(text, '/')) {
    const std::vector<absl::string_view> parts = absl::StrSplit(one, ':');
    InfiniteHipStage stage;
    if (parts.size() != 3) return MethodSettings::Refused(text, kWanted);
    absl::string_view survivors = parts[1];
    const bool multiple = absl::ConsumeSuffix(&survivors, "x");
    int64_t& to = multiple ? stage.multiple : stage.survivors;
    const bool numbers = absl::SimpleAtoi(parts[0], &stage.chunk) &&
                         absl::SimpleAtoi(survivors, &to) &&
                         absl::SimpleAtoi(parts[2], &stage.refresh);
    constexpr int64_t kMost = int64_t{1} << 20;
    for (const int64_t value : {stage.chunk, to, stage.refresh}) {
      if (!numbers || value < 1 || value > kMost) return MethodSettings::Refused(text, kWanted);
    }
    stages.push_back(stage);
  }
  return stages.back().multiple == 1 ? absl::OkStatus() : MethodSettings::Refused(text, kWanted);
}

class InfiniteHipMethodType final : public MethodType {
 public:
  absl::string_view name() const override { return "infinitehip"; }
  absl::Status Parse(const MethodSettings& settings, SelectorConfig& config) const override {
    using Refresh = std::vector<int64_t>;
    InfiniteHipConfig given;
    std::vector<InfiniteHipStage>& stages = given.stages;
    Presets presets;
    RETURN_IF_ERROR(settings.Set(
        {{"preset", MethodSettings::OneOf<Refresh>(
                        presets.refresh,
                        {{"default", {16, 8, 4}}, {"fast", {32, 16, 8}}, {"flash", {96, 24, 8}}})},
         {"survivors",
          MethodSettings::OneOf<bool>(presets.scaled, {{"published", false}, {"scaled", true}})},
         {"stages", [&stages](absl::string_view text) { return ParseStages(text, stages); }},
         {"block_q", MethodSettings::Number(given.block_q, 1, 1024)},
         {"mask", MethodSettings::Mask(config.mask)}}));
    if (settings.Has("stages")) {
      if (settings.Has("preset") || settings.Has("survivors"))
        return settings.Refuse("stages stand instead of preset and survivors");
    }
    for (size_t i = 0; !settings.Has("stages") && i < stages.size(); ++i) {
      stages[i].refresh = presets.refresh[i];
      if (!presets.scaled) continue;
      stages[i].survivors = 0;
      stages[i].multiple = int64_t{1} << (2 * (stages.size() - 1 - i));
    }
    config.options = std::move(given);
    return absl::OkStatus();
  }
  std::string Describe(const SelectorConfig& config) const override {
    return config.mask == SelectorMask::kQHead ? ":mask=q-head" : "";
  }
  absl::Status ValidateCuda(const SelectorConfig& config) const override {
    RETURN_IF_ERROR(CheckCudaMask(config));
    const auto given = OptionsOf<InfiniteHipConfig>(config);
    return given.block_q == 1 ? absl::OkStatus() : NotOnGpu("block_q", given.block_q, "1");
  }
  absl::StatusOr<std::unique_ptr<RowSelector>> Make(const SelectorConfig& config,
                                                    const SelectorInput& input) const override {
    return std::make_unique<InfiniteHipSelector>(OptionsOf<InfiniteHipConfig>(config), input.shape,
                                                 input.zone, input.rows);
  }
};

}  // namespace

const MethodType& InfiniteHipMethod() {
  static const InfiniteHipMethodType method;
  return method;
}

}  // namespace carrel::decoder
