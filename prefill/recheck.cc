#include "prefill/recheck.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <set>

#include "absl/strings/str_format.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/window_attention/window_attention.h"
#include "kernels/layer/rope/rope.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/storage/store.h"
#include "model/cpu_backend.h"

namespace carrel::prefill {
namespace {

constexpr int64_t kSpanRows = 1024;  // sealed rows that are widened together
constexpr double kRounding = 0x1p-8, kMargin = 4, kMostAllowed = 0.75;

// Up or down, at random; a run of them begins anywhere in the table.
class Signs {
 public:
  Signs(uint64_t seed, int64_t longest_run) : signs_(static_cast<size_t>(kStarts + longest_run)) {
    std::mt19937_64 random(seed);
    for (float& sign : signs_) sign = random() % 2 == 0 ? 1.0f : -1.0f;
  }
  const float* Run(uint64_t of) const {
    return &signs_[static_cast<size_t>(of * 0x9E3779B97F4A7C15ull >> 52)];
  }

 private:
  static constexpr int64_t kStarts = 4096;
  std::vector<float> signs_;
};

// |a - b| / max(|a|, |b|); 0 if both are nothing.
double Distance(const float* a, const float* b, int64_t n) {
  double aa = 0, bb = 0, off = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double x = a[i], y = b[i];
    aa += x * x;
    bb += y * y;
    off += (x - y) * (x - y);
  }
  if (aa == 0 && bb == 0) return 0;
  return std::sqrt(off / std::max(aa, bb));
}

// Tokens [0, m) of every array are those that are computed again, [m, 2 m) their shadows.
class Rechecker {
 public:
  Rechecker(const model::Checkpoint& checkpoint, const kvstore::StoredContext& sealed,
            const RecheckConfig& config, std::vector<Position> positions, ThreadPool* pool)
      : model_(checkpoint.config),
        shape_(model_.shape),
        sealed_(sealed),
        config_(config),
        positions_(std::move(positions)),
        pool_(pool),
        m_(static_cast<int64_t>(positions_.size())),
        backend_(model::MakeCpuBackend(model_, checkpoint.weights, pool, model::RopeStage::kLeftOut,
                                       checkpoint.adapter)),
        signs_(config.seed,
               std::max<int64_t>(model_.hidden_size, int64_t{shape_.q_heads} * shape_.head_dim)),
        hidden_(static_cast<size_t>(2 * m_ * model_.hidden_size)),
        q_(static_cast<size_t>(2 * m_ * shape_.q_heads * shape_.head_dim)),
        k_(static_cast<size_t>(2 * m_ * shape_.kv_heads * shape_.head_dim)),
        v_(k_.size()),
        attended_(q_.size()) {}

  absl::StatusOr<double> Run(const std::vector<TokenId>& tokens) {
    std::vector<TokenId> ids;
    for (const Position at : positions_) ids.push_back(tokens[static_cast<size_t>(at)]);
    ids.insert(ids.end(), ids.begin(), ids.begin() + m_);
    RETURN_IF_ERROR(backend_->Embed(ids, hidden_.data()));
    for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
      const bool last = layer.value() + 1 == shape_.layers;
      Move(layer.value(), model_.hidden_size, hidden_);
      RETURN_IF_ERROR(
          backend_->ProjectQkv(layer, hidden_.data(), 2 * m_, 0, q_.data(), k_.data(), v_.data()));
      if (config_.key_position == KeyPosition::kAfterRope) Turn(layer, shape_.kv_heads, k_);
      RETURN_IF_ERROR(OpenRows(layer, last));
      RETURN_IF_ERROR(Compare(layer));
      if (last) break;
      if (config_.key_position == KeyPosition::kNone) Turn(layer, shape_.kv_heads, k_);
      Turn(layer, shape_.q_heads, q_);
      Attend(layer);
      Move(layer.value(), int64_t{shape_.q_heads} * shape_.head_dim, attended_);
      RETURN_IF_ERROR(backend_->FinishLayer(layer, attended_.data(), 2 * m_, hidden_.data()));
      sealed_.ReleasePages(layer.value());
    }
    return worst_;
  }

 private:
  // The shadows' numbers, by as much as products may.
  void Move(int32_t layer, int64_t width, std::vector<float>& x) const {
    const auto by = static_cast<float>(config_.product_error);
    for (int64_t i = m_; i < 2 * m_; ++i) {
      const float* const sign = signs_.Run(static_cast<uint64_t>(layer * 4 * m_ + i));
      for (int64_t c = 0; c < width; ++c) x[i * width + c] *= 1.0f + by * sign[c];
    }
  }

  Position PositionOf(int64_t i) const { return positions_[static_cast<size_t>(i % m_)]; }

  void Turn(Layer layer, int64_t heads, std::vector<float>& x) const {
    const std::vector<float> inv_freq = model::RopeInvFreq(model_.RopeOf(layer), shape_.head_dim);
    for (int64_t i = 0; i < 2 * m_; ++i) {
      kernels::Rope(&x[i * heads * shape_.head_dim], 1, heads, shape_.head_dim, PositionOf(i),
                    inv_freq.data());
    }
  }

  // The layer's rows, as far as they are needed, verified: only_own, no token is attended to.
  absl::Status OpenRows(Layer layer, bool only_own) {
    rows_.clear();
    for (KvHead head(0); head.value() < shape_.kv_heads; head = head.next()) {
      ASSIGN_OR_RETURN(rows_.emplace_back(), kvstore::Rows::OpenKeys(sealed_, layer, head));
      ASSIGN_OR_RETURN(rows_.emplace_back(), kvstore::Rows::OpenValues(sealed_, layer, head));
    }
    std::vector<absl::Status> verified(rows_.size());
    pool_->ParallelFor(static_cast<int64_t>(rows_.size()), [&](int64_t i) {
      const kvstore::Rows& rows = rows_[static_cast<size_t>(i)];
      verified[i] = only_own ? rows.VerifyRows(positions_.data(), m_)
                             : rows.Verify({0, positions_.back() + 1});
    });
    for (const absl::Status& status : verified) RETURN_IF_ERROR(status);
    return absl::OkStatus();
  }

  const float* Row(const std::vector<float>& x, int64_t i, int64_t head) const {
    return &x[(i * shape_.kv_heads + head) * shape_.head_dim];
  }

  absl::Status Compare(Layer layer) {
    const int64_t d = shape_.head_dim;
    for (const std::vector<float>* x : {&k_, &v_}) {
      for (int64_t i = 0; i < m_ * shape_.kv_heads; ++i) {
        const int64_t token = i / shape_.kv_heads, head = i % shape_.kv_heads;
        sensitivity_ =
            std::max(sensitivity_, Distance(Row(*x, token, head), Row(*x, m_ + token, head), d));
      }
    }
    const double allowed = std::min(kMostAllowed, kRounding + kMargin * sensitivity_);
    std::vector<float> stored(static_cast<size_t>(d));
    for (int64_t i = 0; i < m_ * shape_.kv_heads * 2; ++i) {
      const bool keys = i % 2 == 0;
      const int64_t head = i / 2 % shape_.kv_heads, token = i / 2 / shape_.kv_heads;
      const kvstore::Rows& rows = rows_[static_cast<size_t>(2 * head + (keys ? 0 : 1))];
      WidenToFloat(DType::kBf16, rows.Address(PositionOf(token)), d, stored.data());
      const double error = Distance(Row(keys ? k_ : v_, token, head), stored.data(), d);
      if (!(error <= allowed)) {  // nor a number that is none
        return absl::DataLossError(absl::StrFormat(
            "recheck: layer %d kv_head %d token %d: %s computed again is off by %.3g of its norm "
            "from what is sealed, rounding allows %.3g",
            layer.value(), head, PositionOf(token), keys ? "K" : "V", error, allowed));
      }
      worst_ = std::max(worst_, error / allowed);
    }
    return absl::OkStatus();
  }

  // Of a KV head's tokens and shadows over a span of sealed rows: partial attention.
  struct Partial {
    std::vector<float> out, lse;  // [2 m, group, head_dim], [2 m, group]
  };

  // Rows are widened, and moved for the shadows, once for all tokens.
  void Attend(Layer layer) {
    const int64_t d = shape_.head_dim, group = shape_.group();
    const std::vector<float> inv_freq = model::RopeInvFreq(model_.RopeOf(layer), d);
    const int64_t spans = (positions_.back() + kSpanRows - 1) / kSpanRows;
    std::vector<Partial> partial(static_cast<size_t>(spans * shape_.kv_heads));
    pool_->ParallelFor(spans * shape_.kv_heads, [&](int64_t unit) {
      partial[unit] = AttendSpan(layer, unit % shape_.kv_heads, unit / shape_.kv_heads * kSpanRows,
                                 inv_freq.data());
    });
    pool_->ParallelFor(2 * m_ * shape_.kv_heads, [&](int64_t unit) {
      const int64_t i = unit / shape_.kv_heads, head = unit % shape_.kv_heads;
      std::vector<float> lse(static_cast<size_t>(group)), scratch(lse.size());
      float* const out = &attended_[(i * shape_.q_heads + head * group) * d];
      AttendRows(i, head, Row(k_, i, head), Row(v_, i, head), 1, out, lse.data(), scratch);
      for (int64_t span = 0; span < spans; ++span) {
        const Partial& part = partial[span * shape_.kv_heads + head];
        kernels::MergeStates(out, lse.data(), &part.out[i * group * d], &part.lse[i * group], group,
                             d);
      }
    });
  }

  void AttendRows(int64_t i, int64_t head, const float* k, const float* v, int64_t rows, float* out,
                  float* lse, std::vector<float>& scratch) const {
    const int64_t d = shape_.head_dim, group = shape_.group();
    kernels::WindowAttentionParams params;
    params.q = &q_[(i * shape_.q_heads + head * group) * d];
    params.group = group;
    params.k = k;
    params.v = v;
    params.rows = rows;
    params.head_dim = d;
    params.scale = 1.0f / std::sqrt(static_cast<float>(d));
    params.out = out;
    params.lse = lse;
    kernels::WindowAttention(params, scratch.data());
  }

  Partial AttendSpan(Layer layer, int64_t head, Position begin, const float* inv_freq) const {
    const int64_t d = shape_.head_dim, group = shape_.group();
    const int64_t n = std::min<int64_t>(kSpanRows, positions_.back() - begin);
    std::vector<float> k(static_cast<size_t>(n * d)), v(k.size());
    std::vector<float> scratch(static_cast<size_t>(group * n));
    Widen(rows_[static_cast<size_t>(2 * head)], begin, n, k.data());
    Widen(rows_[static_cast<size_t>(2 * head + 1)], begin, n, v.data());
    if (config_.key_position == KeyPosition::kNone) {
      kernels::Rope(k.data(), n, 1, d, begin, inv_freq);
    }
    Partial partial;
    partial.out.resize(static_cast<size_t>(2 * m_ * group * d));
    partial.lse.resize(static_cast<size_t>(2 * m_ * group));
    const int64_t window = model_.Window(layer);
    for (int64_t i = 0; i < 2 * m_; ++i) {
      if (i == m_) {
        MoveRows(static_cast<uint64_t>(layer.value() * shape_.kv_heads + head), begin, n, k, v);
      }
      const Position end = PositionOf(i);
      const Position from = window > 0 ? std::max<Position>(begin, end + 1 - window) : begin;
      const int64_t rows = std::max<int64_t>(0, std::min(begin + n, end) - from);
      AttendRows(i, head, &k[rows > 0 ? (from - begin) * d : 0],
                 &v[rows > 0 ? (from - begin) * d : 0], rows, &partial.out[i * group * d],
                 &partial.lse[i * group], scratch);
    }
    return partial;
  }

  void Widen(const kvstore::Rows& rows, Position at, int64_t n, float* out) const {
    rows.ForEachPiece({at, at + n}, [&](Position first, const void* address, int64_t count) {
      WidenToFloat(DType::kBf16, address, count * shape_.head_dim,
                   out + (first - at) * shape_.head_dim);
    });
  }

  // By more than rounding them to bf16 did.
  void MoveRows(uint64_t place, Position at, int64_t n, std::vector<float>& k,
                std::vector<float>& v) const {
    const int64_t d = shape_.head_dim;
    const auto by = static_cast<float>(kRounding);
    for (int64_t row = 0; row < n; ++row) {
      const uint64_t of = (place << 32) + 2 * static_cast<uint64_t>(at + row);
      const float *const key_sign = signs_.Run(of), *const value_sign = signs_.Run(of + 1);
      for (int64_t c = 0; c < d; ++c) k[row * d + c] *= 1.0f + by * key_sign[c];
      for (int64_t c = 0; c < d; ++c) v[row * d + c] *= 1.0f + by * value_sign[c];
    }
  }

  const model::ModelConfig& model_;
  const AttentionShape& shape_;
  const kvstore::StoredContext& sealed_;
  const RecheckConfig& config_;
  const std::vector<Position> positions_;
  ThreadPool* const pool_;
  const int64_t m_;
  const std::unique_ptr<model::Backend> backend_;
  const Signs signs_;
  std::vector<kvstore::Rows> rows_;  // of the layer: K and V of each head
  std::vector<float> hidden_, q_, k_, v_, attended_;
  double sensitivity_ = 0;
  double worst_ = 0;
};

}  // namespace

bool CanRecheck(const AttentionConfig& attention) {
  return attention.kind == AttentionKind::kDense && attention.rope == model::Rope::kTrained;
}

std::vector<Position> DrawPositions(int64_t all, int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<Position> any(0, all - 1);
  std::set<Position> drawn;
  while (static_cast<int64_t>(drawn.size()) < std::min(all, count)) drawn.insert(any(random));
  return {drawn.begin(), drawn.end()};
}

absl::StatusOr<double> Recheck(const model::Checkpoint& checkpoint,
                               const std::vector<TokenId>& tokens,
                               const kvstore::StoredContext& sealed, const RecheckConfig& config,
                               ThreadPool* pool) {
  const auto all = static_cast<int64_t>(tokens.size());
  Rechecker rechecker(checkpoint, sealed, config, DrawPositions(all, config.tokens, config.seed),
                      pool);
  return rechecker.Run(tokens);
}

}  // namespace carrel::prefill
