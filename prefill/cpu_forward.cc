#include <algorithm>
#include <utility>

#include "common/status.h"
#include "kernels/encode/query_drift/query_drift.h"
#include "model/cpu_backend.h"
#include "model/transformer.h"
#include "prefill/dense_attention.h"
#include "prefill/layer_forward.h"
#include "prefill/sparse_attention.h"

namespace carrel::prefill {
namespace {

std::unique_ptr<LayerAttention> MakeAttention(const model::ModelConfig& model,
                                              const ForwardPlan& plan, ThreadPool* pool) {
  const AttentionConfig& config = plan.attention;
  const std::vector<float> inv_freq = model::RopeInvFreq(model.rope, model.shape.head_dim);
  const bool undo =
      config.key_position == KeyPosition::kNone && config.rope == model::Rope::kTrained;
  std::vector<float> undo_rope = undo ? inv_freq : std::vector<float>();
  if (config.kind == AttentionKind::kDense) {
    return std::make_unique<DenseAttention>(model.shape, plan.tokens, plan.sample_positions,
                                            std::move(undo_rope), pool, model.Windows(),
                                            plan.probe);
  }
  CARREL_CHECK(plan.probe == 0);
  return MakeSparseAttention(config, model.shape, plan.tokens, plan.sample_positions,
                             std::move(undo_rope), inv_freq, model.max_position_embeddings, pool);
}

class CpuForward final : public LayerForward {
 public:
  CpuForward(const model::Checkpoint& checkpoint, const ForwardPlan& plan, int64_t block_tokens,
             ThreadPool* pool)
      : shape_(checkpoint.config.shape),
        hidden_size_(checkpoint.config.hidden_size),
        tokens_(plan.tokens),
        all_tokens_(plan.tokens + plan.probe),
        block_tokens_(block_tokens),
        drift_positions_(SamplePositions(plan.tokens, kDriftTokens)),
        recheck_positions_(plan.recheck_positions),
        config_(checkpoint.config),
        rope_applied_(plan.attention.rope == model::Rope::kTrained),
        backend_(model::MakeCpuBackend(
            checkpoint.config, checkpoint.weights, pool,
            rope_applied_ ? model::RopeStage::kApplied : model::RopeStage::kLeftOut,
            checkpoint.adapter)),
        transformer_(backend_.get()),
        attention_(MakeAttention(checkpoint.config, plan, pool)),
        hidden_(static_cast<size_t>(all_tokens_ * hidden_size_)) {}

  absl::Status Embed(const std::vector<TokenId>& tokens) override {
    return backend_->Embed(tokens, hidden_.data());
  }
  absl::Status SetHidden(Layer layer, const HiddenState& state) override {
    CARREL_CHECK(layer.value() > 0 && state.all.size() == hidden_.size() &&
                 state.before.size() == drift_positions_.size() * hidden_size_);
    std::copy(state.all.begin(), state.all.end(), hidden_.begin());
    before_.assign(state.before.begin(), state.before.end());
    return absl::OkStatus();
  }
  absl::StatusOr<HiddenState> Hidden() override { return HiddenState{hidden_, before_}; }

  absl::Status Run(Layer layer, bool rows_only, absl::FunctionRef<absl::Status(int64_t)> passed,
                   absl::FunctionRef<absl::Status(LayerRows)> take) override {
    ASSIGN_OR_RETURN(std::vector<float> drift, MeasureDrift(layer));
    std::vector<float> entering = HiddenOf(recheck_positions_);
    for (int64_t at = 0; at < tokens_; at += block_tokens_) {
      const int64_t n = std::min(block_tokens_, tokens_ - at);
      RETURN_IF_ERROR(RunBlock(layer, rows_only, at, n));
      RETURN_IF_ERROR(passed(at + n));
    }
    // The probe never shares a block with the document: how many tokens pass together may show in
    // their bits.
    for (int64_t at = tokens_; at < all_tokens_; at += block_tokens_) {
      RETURN_IF_ERROR(RunBlock(layer, rows_only, at, std::min(block_tokens_, all_tokens_ - at)));
    }
    LayerRows rows = attention_->TakeLayer(layer);
    rows.query_drift = std::move(drift);
    rows.entering = std::move(entering);
    return take(std::move(rows));
  }

  ForwardTimes times() const override { return {}; }
  int64_t device_bytes() const override { return 0; }

 private:
  absl::Status RunBlock(Layer layer, bool rows_only, int64_t at, int64_t n) {
    float* const hidden = &hidden_[at * hidden_size_];
    return rows_only ? transformer_.ProjectLayer(layer, n, at, hidden, *attention_)
                     : transformer_.ForwardLayer(layer, n, at, hidden, *attention_);
  }

  std::vector<float> HiddenOf(const std::vector<Position>& positions) const {
    std::vector<float> of;
    of.reserve(positions.size() * static_cast<size_t>(hidden_size_));
    for (const Position position : positions) {
      const float* row = &hidden_[position * hidden_size_];
      of.insert(of.end(), row, row + hidden_size_);
    }
    return of;
  }

  // Of a layer that is about to be run; empty for the first. Keeps what enters it for the next one.
  absl::StatusOr<std::vector<float>> MeasureDrift(Layer layer) {
    std::vector<float> entering = HiddenOf(drift_positions_);
    std::swap(before_, entering);
    if (layer.value() == 0) return std::vector<float>();
    const auto n = static_cast<int64_t>(drift_positions_.size());
    const int64_t width = int64_t{shape_.q_heads} * shape_.head_dim;
    // Only their difference before RoPE counts, so they may stand anywhere, if at the same places.
    std::vector<float> q(static_cast<size_t>(n * width)), predicted_q(q.size());
    RETURN_IF_ERROR(backend_->ProjectQuery(layer, before_.data(), n, 0, q.data()));
    RETURN_IF_ERROR(backend_->ProjectQuery(layer, entering.data(), n, 0, predicted_q.data()));
    std::vector<float> drift(static_cast<size_t>(width)), scratch(2 * drift.size());
    int64_t tokens = 0;
    kernels::QueryDriftParams params;
    params.q = q.data();
    params.predicted_q = predicted_q.data();
    params.n = n;
    params.heads = shape_.q_heads;
    params.head_dim = shape_.head_dim;
    const std::vector<float> inv_freq = model::RopeInvFreq(config_.RopeOf(layer), shape_.head_dim);
    params.inv_freq = rope_applied_ ? inv_freq.data() : nullptr;
    params.mean = drift.data();
    params.tokens = &tokens;
    params.scratch = scratch.data();
    kernels::LearnQueryDrift(params);
    return drift;
  }

  const AttentionShape shape_;
  const int64_t hidden_size_;
  const int64_t tokens_, all_tokens_;  // with the probe's
  const int64_t block_tokens_;
  const std::vector<Position> drift_positions_, recheck_positions_;
  const model::ModelConfig& config_;
  const bool rope_applied_;  // else queries leave the backend before RoPE
  const std::unique_ptr<model::Backend> backend_;
  model::Transformer transformer_;
  const std::unique_ptr<LayerAttention> attention_;
  std::vector<float> hidden_;
  std::vector<float> before_;  // of drift_positions_: what entered the layer that was run last
};

}  // namespace

std::unique_ptr<LayerForward> MakeCpuForward(const model::Checkpoint& checkpoint,
                                             const ForwardPlan& plan, int64_t block_tokens,
                                             ThreadPool* pool) {
  return std::make_unique<CpuForward>(checkpoint, plan, block_tokens, pool);
}

}  // namespace carrel::prefill
