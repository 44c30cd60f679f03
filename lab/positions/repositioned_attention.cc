#include "decoder/zone/repositioned_attention.h"

#include <algorithm>

#include "common/dtype.h"
#include "common/status.h"
#include "kernels/attention/window_attention/window_attention.h"
#include "kernels/layer/rope/rope_table.h"
#include "kernels/of_heads.h"

namespace carrel::decoder {
namespace {

// Rows that are turned and attended to at a time: they stay in the L2 cache.
constexpr int64_t kBlockRows = 512;

class Repositioned final : public RepositionedAttention {
 public:
  Repositioned(const OpenedContext& context, const model::ModelConfig& model, const Window& window)
      : shape_(model.shape),
        trained_tokens_(model.max_position_embeddings),
        zone_(context.zone),
        rope_(model::RopeInvFreq(model.rope, model.shape.head_dim), trained_tokens_),
        rows_(context.rows),
        window_(window) {}

  KeyPlacement PlacementOf(Layer layer, int64_t n, int64_t first) const override {
    return {.rope = &rope_,
            .stream = local() + window_.rows(layer) - n + first + 1,
            .chunk_indexed = layer.value() < model::kChunkIndexedLayers};
  }

  void Attend(Layer layer, KvHead head, const float* q, int64_t n, int64_t token,
              const std::vector<Position>* chosen, Partial& partial) const override {
    thread_local std::vector<float> turned, k, v, scores, out;
    const int64_t d = shape_.head_dim, group = shape_.group();
    const HeadView& context = rows_->At(layer, head);
    const int64_t sink = zone_.begin;
    const int64_t of_zone = chosen == nullptr ? zone_.rows() : static_cast<int64_t>(chosen->size());
    const int64_t of_context = sink + of_zone + local();
    const int64_t total = of_context + window_.rows(layer) - n + token + 1;  // itself is the last
    const int64_t shared = std::max<int64_t>(0, total - trained_tokens_);
    const int64_t first_q_head = token * shape_.q_heads + head.value() * group;
    turned.resize(static_cast<size_t>(group * d));
    for (int64_t h = 0; h < group; ++h) {
      rope_.Turn(q + (first_q_head + h) * d, total - 1 - shared,
                 &turned[static_cast<size_t>(h * d)]);
    }
    k.resize(static_cast<size_t>(kBlockRows * d));
    v.resize(k.size());
    out.resize(static_cast<size_t>(group * (d + 1)));
    scores.resize(static_cast<size_t>(group * kBlockRows));
    for (int64_t first = 0; first < total; first += kBlockRows) {
      const int64_t count = std::min(kBlockRows, total - first);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t rank = first + i;
        float* key = &k[static_cast<size_t>(i * d)];
        float* value = &v[static_cast<size_t>(i * d)];
        if (rank < of_context) {
          Position row = rank;  // sink
          if (rank >= sink + of_zone) {
            row = zone_.end + (rank - sink - of_zone);
          } else if (rank >= sink && chosen != nullptr) {
            row = (*chosen)[static_cast<size_t>(rank - sink)];
          }
          WidenToFloat(DType::kBf16, context.Key(row), d, key);
          WidenToFloat(DType::kBf16, context.Value(row), d, value);
        } else {
          const int64_t at = (rank - of_context) * d;
          std::copy_n(window_.k(layer, head) + at, d, key);
          std::copy_n(window_.v(layer, head) + at, d, value);
        }
        rope_.Turn(key, std::max<int64_t>(0, rank - shared), key);
      }
      auto params = kernels::OfHeads<kernels::WindowAttentionParams>(shape_);
      params.q = turned.data();
      params.k = k.data();
      params.v = v.data();
      params.rows = count;
      params.out = out.data();
      params.lse = out.data() + group * d;
      kernels::WindowAttention(params, scores.data());
      partial.Merge(shape_, token, head, out.data());
    }
  }

 private:
  // Rows of the context behind the zone, but for those given up.
  int64_t local() const { return rows_->tokens() - zone_.end - window_.given_up(); }

  const AttentionShape shape_;
  const int64_t trained_tokens_;
  const RowRange zone_;
  const kernels::RopeTable rope_;
  const std::shared_ptr<const HostRows> rows_;
  const Window& window_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RepositionedAttention>> RepositionedAttention::Create(
    const OpenedContext& context, const model::ModelConfig& model, const Window& window) {
  CARREL_CHECK(context.config.rope == Rope::kInfiniteHip && context.rows != nullptr);
  return std::make_unique<Repositioned>(context, model, window);
}

}  // namespace carrel::decoder
