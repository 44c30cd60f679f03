#include <algorithm>
#include <utility>

#include "common/status.h"
#include "model/cpu_backend.h"
#include "model/transformer.h"
#include "prefill/dense_attention.h"
#include "prefill/layer_forward.h"
#include "prefill/sparse_attention.h"

namespace carrel::prefill {
namespace {

std::unique_ptr<LayerAttention> MakeAttention(const model::ModelConfig& model, int64_t tokens,
                                              std::vector<Position> sample_positions,
                                              const AttentionConfig& config, ThreadPool* pool) {
  const std::vector<float> inv_freq = model::RopeInvFreq(model.rope, model.shape.head_dim);
  const bool undo =
      config.key_position == KeyPosition::kNone && config.rope == model::Rope::kTrained;
  std::vector<float> undo_rope = undo ? inv_freq : std::vector<float>();
  if (config.kind == AttentionKind::kDense) {
    return std::make_unique<DenseAttention>(model.shape, tokens, std::move(sample_positions),
                                            std::move(undo_rope), pool);
  }
  return std::make_unique<SparseAttention>(config, model.shape, tokens, std::move(sample_positions),
                                           std::move(undo_rope), inv_freq,
                                           model.max_position_embeddings, pool);
}

class CpuForward final : public LayerForward {
 public:
  CpuForward(const model::Checkpoint& checkpoint, int64_t tokens,
             std::vector<Position> sample_positions, const AttentionConfig& attention,
             int64_t block_tokens, ThreadPool* pool)
      : hidden_size_(checkpoint.config.hidden_size),
        tokens_(tokens),
        block_tokens_(block_tokens),
        backend_(model::MakeCpuBackend(checkpoint.config, checkpoint.weights, pool,
                                       attention.rope == model::Rope::kTrained
                                           ? model::RopeStage::kApplied
                                           : model::RopeStage::kLeftOut)),
        transformer_(backend_.get()),
        attention_(
            MakeAttention(checkpoint.config, tokens, std::move(sample_positions), attention, pool)),
        hidden_(static_cast<size_t>(tokens * hidden_size_)) {}

  absl::Status Embed(const std::vector<TokenId>& tokens) override {
    return backend_->Embed(tokens, hidden_.data());
  }
  absl::Status SetHidden(std::vector<float> hidden) override {
    CARREL_CHECK(hidden.size() == hidden_.size());
    hidden_ = std::move(hidden);
    return absl::OkStatus();
  }
  absl::StatusOr<absl::Span<const float>> Hidden() override { return absl::MakeConstSpan(hidden_); }

  absl::Status Run(Layer layer, bool rows_only, absl::FunctionRef<void(int64_t)> passed,
                   absl::FunctionRef<absl::Status(LayerRows)> take) override {
    for (int64_t at = 0; at < tokens_; at += block_tokens_) {
      const int64_t n = std::min(block_tokens_, tokens_ - at);
      float* const hidden = &hidden_[at * hidden_size_];
      if (rows_only) {
        RETURN_IF_ERROR(transformer_.ProjectLayer(layer, n, at, hidden, *attention_));
      } else {
        RETURN_IF_ERROR(transformer_.ForwardLayer(layer, n, at, hidden, *attention_));
      }
      passed(at + n);
    }
    return take(attention_->TakeLayer(layer));
  }

  ForwardTimes times() const override { return {}; }
  int64_t device_bytes() const override { return 0; }

 private:
  const int64_t hidden_size_;
  const int64_t tokens_;
  const int64_t block_tokens_;
  const std::unique_ptr<model::Backend> backend_;
  model::Transformer transformer_;
  const std::unique_ptr<LayerAttention> attention_;
  std::vector<float> hidden_;
};

}  // namespace

std::unique_ptr<LayerForward> MakeCpuForward(const model::Checkpoint& checkpoint, int64_t tokens,
                                             std::vector<Position> sample_positions,
                                             const AttentionConfig& attention, int64_t block_tokens,
                                             ThreadPool* pool) {
  return std::make_unique<CpuForward>(checkpoint, tokens, std::move(sample_positions), attention,
                                      block_tokens, pool);
}

}  // namespace carrel::prefill
