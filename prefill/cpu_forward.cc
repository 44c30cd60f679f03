#include <algorithm>
#include <utility>

#include "common/status.h"
#include "model/cpu_backend.h"
#include "model/transformer.h"
#include "prefill/dense_attention.h"
#include "prefill/layer_forward.h"

namespace carrel::prefill {
namespace {

class CpuForward final : public LayerForward {
 public:
  CpuForward(const model::Checkpoint& checkpoint, int64_t tokens,
             std::vector<Position> sample_positions, int64_t block_tokens, ThreadPool* pool)
      : hidden_size_(checkpoint.config.hidden_size),
        tokens_(tokens),
        block_tokens_(block_tokens),
        backend_(model::MakeCpuBackend(checkpoint.config, checkpoint.weights, pool)),
        transformer_(backend_.get()),
        attention_(checkpoint.config.shape, tokens, std::move(sample_positions), pool),
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

  absl::StatusOr<LayerRows> Run(Layer layer, absl::FunctionRef<void(int64_t)> passed) override {
    for (int64_t at = 0; at < tokens_; at += block_tokens_) {
      const int64_t n = std::min(block_tokens_, tokens_ - at);
      RETURN_IF_ERROR(
          transformer_.ForwardLayer(layer, n, at, &hidden_[at * hidden_size_], attention_));
      passed(at + n);
    }
    return attention_.TakeLayer(layer);
  }

  ForwardTimes times() const override { return {}; }
  int64_t device_bytes() const override { return 0; }

 private:
  const int64_t hidden_size_;
  const int64_t tokens_;
  const int64_t block_tokens_;
  const std::unique_ptr<model::Backend> backend_;
  model::Transformer transformer_;
  DenseAttention attention_;
  std::vector<float> hidden_;
};

}  // namespace

std::unique_ptr<LayerForward> MakeCpuForward(const model::Checkpoint& checkpoint, int64_t tokens,
                                             std::vector<Position> sample_positions,
                                             int64_t block_tokens, ThreadPool* pool) {
  return std::make_unique<CpuForward>(checkpoint, tokens, std::move(sample_positions), block_tokens,
                                      pool);
}

}  // namespace carrel::prefill
