#include "prefill/recheck.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <set>

#include "absl/strings/str_format.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/window_attention/window_attention.h"
#include "kernels/layer/rope/rope.h"
#include "kernels/of_heads.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/storage/store.h"
#include "model/cpu_backend.h"
#include "model/non_finite.h"

namespace carrel::prefill {
namespace {

constexpr int64_t kSpanRows = 1024;  // sealed rows that are widened together
constexpr double kRounding = 0x1p-8, kMargin = 4, kMostAllowed = 0.75;
constexpr uint64_t kLooks = 16;  // at a token that is off by more than its first shadow explains

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

double Allowed(double sensitivity) { return kRounding + kMargin * sensitivity; }

bool AllFinite(const float* x, int64_t n) {
  return std::all_of(x, x + n, [](float v) { return std::isfinite(v); });
}

// Every number of x [rows, width] times 1 + by or 1 - by, as its bits, its column and the seed say.
// Equal numbers of a column go the same way, as rounding moves them: of a text that repeats itself
// no mean takes that off again.
void MoveNumbers(uint64_t seed, float by, int64_t rows, int64_t width, float* x) {
  const auto salt = static_cast<uint32_t>(seed ^ seed >> 32);
  for (int64_t row = 0; row < rows; ++row, x += width) {
    for (int64_t c = 0; c < width; ++c) {
      uint32_t bits;
      std::memcpy(&bits, &x[c], sizeof(bits));
      bits ^= (static_cast<uint32_t>(c) + salt) * 0x9E3779B1u;
      bits = (bits ^ bits >> 16) * 0x85EBCA6Bu;
      bits = (bits ^ bits >> 13) * 0xC2B2AE35u;
      x[c] *= 1.0f + ((bits & 0x80000000u) != 0 ? by : -by);
    }
  }
}

// Tokens [0, m) of every array are those that are computed again, [m, 2 m) their shadows.
class Rechecker {
 public:
  Rechecker(const model::Checkpoint& checkpoint, const kvstore::StoredContext& sealed,
            const RecheckConfig& config, std::vector<Position> positions, ThreadPool* pool)
      : checkpoint_(checkpoint),
        model_(checkpoint.config),
        shape_(model_.shape),
        sealed_(sealed),
        config_(config),
        positions_(std::move(positions)),
        pool_(pool),
        m_(static_cast<int64_t>(positions_.size())),
        width_(model_.hidden_size),
        backend_(model::MakeCpuBackend(model_, checkpoint.weights, pool, model::RopeStage::kLeftOut,
                                       checkpoint.adapter)),
        entered_(static_cast<size_t>(2 * m_ * width_)),
        hidden_(entered_.size()),
        q_(static_cast<size_t>(2 * m_ * shape_.q_heads * shape_.head_dim)),
        k_(static_cast<size_t>(2 * m_ * shape_.kv_heads * shape_.head_dim)),
        v_(k_.size()),
        attended_(q_.size()) {}

  absl::StatusOr<double> Run(const std::vector<TokenId>& tokens, EnteringStates entering) {
    std::vector<TokenId> ids;
    for (const Position at : positions_) ids.push_back(tokens[static_cast<size_t>(at)]);
    ids.insert(ids.end(), ids.begin(), ids.begin() + m_);
    RETURN_IF_ERROR(backend_->Embed(ids, hidden_.data()));
    for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
      ASSIGN_OR_RETURN(const std::vector<float> state, entering(layer));
      RETURN_IF_ERROR(CompareStates(layer, state));
      if (layer.value() > 0) sealed_.ReleasePages(layer.value() - 1);
      const bool last = layer.value() + 1 == shape_.layers;
      RETURN_IF_ERROR(Project(layer, state.data(), last));
      RETURN_IF_ERROR(CompareRows(layer));
      if (!last) RETURN_IF_ERROR(Finish(layer));
    }
    return worst_;
  }

 private:
  // Seeds of what is moved.
  enum Moved : uint64_t { kState = 0, kAttended = 1, kKeys = 2, kValues = 3 };
  uint64_t SeedOf(Layer layer, Moved what) const {
    return config_.seed * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(layer.value()) * 4 + what;
  }

  // Q, K and V of what entered the layer, and of their shadows, and the layer's rows.
  absl::Status Project(Layer layer, const float* state, bool only_own_rows) {
    const int64_t floats = m_ * width_;
    std::copy_n(state, floats, entered_.data());
    std::copy_n(state, floats, &entered_[floats]);
    MoveNumbers(SeedOf(layer, kState), static_cast<float>(config_.product_error), m_, width_,
                &entered_[floats]);
    hidden_ = entered_;
    RETURN_IF_ERROR(
        backend_->ProjectQkv(layer, hidden_.data(), 2 * m_, 0, q_.data(), k_.data(), v_.data()));
    if (config_.key_position == KeyPosition::kAfterRope) Turn(layer, shape_.kv_heads, k_);
    return OpenRows(layer, only_own_rows);
  }

  // What leaves the layer.
  absl::Status Finish(Layer layer) {
    if (config_.key_position == KeyPosition::kNone) Turn(layer, shape_.kv_heads, k_);
    Turn(layer, shape_.q_heads, q_);
    Attend(layer);
    const int64_t width = int64_t{shape_.q_heads} * shape_.head_dim;
    MoveNumbers(SeedOf(layer, kAttended), static_cast<float>(config_.product_error), m_, width,
                &attended_[m_ * width]);
    return backend_->FinishLayer(layer, attended_.data(), 2 * m_, hidden_.data());
  }

  // What the layer added to token i of [0, 2 m), if `left` is what left it.
  std::vector<float> Added(const float* left, int64_t i) const {
    std::vector<float> added(static_cast<size_t>(width_));
    const float* const entered = &entered_[i * width_];
    for (int64_t c = 0; c < width_; ++c) added[c] = left[c] - entered[c];
    return added;
  }

  double SensitivityOf(int64_t i) const {
    return Distance(Added(&hidden_[i * width_], i).data(),
                    Added(&hidden_[(m_ + i) * width_], m_ + i).data(), width_);
  }

  // The same of token i with rows moved in other ways: a token that stands between two states is
  // taken to the other one by some.
  absl::StatusOr<double> LookAgain(Layer layer, int64_t i) const {
    double sensitivity = 0;
    for (uint64_t look = 1; look <= kLooks; ++look) {
      RecheckConfig config = config_;
      config.seed += look;
      Rechecker again(checkpoint_, sealed_, config, {PositionOf(i)}, pool_);
      RETURN_IF_ERROR(again.Project(layer, &entered_[i * width_], /*only_own_rows=*/false));
      RETURN_IF_ERROR(again.Finish(layer));
      sensitivity = std::max(sensitivity, again.SensitivityOf(0));
    }
    return sensitivity;
  }

  // What left the layer before, computed again, and what prefill says entered this one.
  absl::Status CompareStates(Layer layer, const std::vector<float>& state) {
    for (int64_t i = 0; i < m_; ++i) {
      const double error = Distance(Added(&hidden_[i * width_], i).data(),
                                    Added(&state[i * width_], i).data(), width_);
      double allowed = Allowed(SensitivityOf(i));
      if (!(error <= allowed) && layer.value() > 0) {
        ASSIGN_OR_RETURN(const double sensitivity, LookAgain(Layer(layer.value() - 1), i));
        allowed = std::max(allowed, Allowed(sensitivity));
      }
      if (!(error <= allowed)) {
        if (!AllFinite(&hidden_[i * width_], width_)) return NoNumbers(layer, i, "what enters");
        return absl::DataLossError(absl::StrFormat(
            "layer %d token %d: what enters the layer, computed again, is off by %.3g of what the "
            "layer before adds, rounding explains %.3g",
            layer.value(), PositionOf(i), error, allowed));
      }
      worst_ = std::max(worst_, error / allowed);
    }
    return absl::OkStatus();
  }

  absl::Status NoNumbers(Layer layer, int64_t i, absl::string_view what) const {
    return model::NameNonFinite(
        *checkpoint_.weights,
        absl::InvalidArgumentError(absl::StrFormat("layer %d token %d: %s is NaN or infinite, also "
                                                   "where it is computed again: the model's "
                                                   "weights hold NaN or infinite numbers",
                                                   layer.value(), PositionOf(i), what)));
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

  absl::Status CompareRows(Layer layer) {
    const int64_t d = shape_.head_dim;
    double sensitivity = 0;
    for (const std::vector<float>* x : {&k_, &v_}) {
      for (int64_t i = 0; i < m_ * shape_.kv_heads; ++i) {
        const int64_t token = i / shape_.kv_heads, head = i % shape_.kv_heads;
        sensitivity =
            std::max(sensitivity, Distance(Row(*x, token, head), Row(*x, m_ + token, head), d));
      }
    }
    const double allowed = std::min(kMostAllowed, Allowed(sensitivity));
    std::vector<float> stored(static_cast<size_t>(d));
    for (int64_t i = 0; i < m_ * shape_.kv_heads * 2; ++i) {
      const bool keys = i % 2 == 0;
      const int64_t head = i / 2 % shape_.kv_heads, token = i / 2 / shape_.kv_heads;
      const kvstore::Rows& rows = rows_[static_cast<size_t>(2 * head + (keys ? 0 : 1))];
      const float* const row = Row(keys ? k_ : v_, token, head);
      WidenToFloat(DType::kBf16, rows.Address(PositionOf(token)), d, stored.data());
      const double error = Distance(row, stored.data(), d);
      if (!(error <= allowed)) {  // nor a number that is none
        if (!AllFinite(row, d)) return NoNumbers(layer, token, keys ? "K" : "V");
        return absl::DataLossError(absl::StrFormat(
            "layer %d kv_head %d token %d: %s computed again is off by %.3g of its norm from what "
            "is sealed, rounding explains %.3g",
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
    auto params = kernels::OfHeads<kernels::WindowAttentionParams>(shape_);
    params.q = &q_[(i * shape_.q_heads + head * group) * d];
    params.k = k;
    params.v = v;
    params.rows = rows;
    params.out = out;
    params.lse = lse;
    kernels::WindowAttention(params, scratch.data());
  }

  Partial AttendSpan(Layer layer, int64_t head, Position begin, const float* inv_freq) const {
    const int64_t d = shape_.head_dim, group = shape_.group();
    const int64_t n = std::min<int64_t>(kSpanRows, positions_.back() - begin);
    std::vector<float> k(static_cast<size_t>(n * d)), v(k.size());
    std::vector<float> scratch(static_cast<size_t>(group * n));
    WidenSpan(layer, head, begin, /*moved=*/false, inv_freq, k, v);
    Partial partial;
    partial.out.resize(static_cast<size_t>(2 * m_ * group * d));
    partial.lse.resize(static_cast<size_t>(2 * m_ * group));
    const int64_t window = model_.Window(layer);
    for (int64_t i = 0; i < 2 * m_; ++i) {
      if (i == m_) WidenSpan(layer, head, begin, /*moved=*/true, inv_freq, k, v);
      const Position end = PositionOf(i);
      const Position from = window > 0 ? std::max<Position>(begin, end + 1 - window) : begin;
      const int64_t rows = std::max<int64_t>(0, std::min(begin + n, end) - from);
      AttendRows(i, head, &k[rows > 0 ? (from - begin) * d : 0],
                 &v[rows > 0 ? (from - begin) * d : 0], rows, &partial.out[i * group * d],
                 &partial.lse[i * group], scratch);
    }
    return partial;
  }

  // Rows of a KV head as they are attended to. moved: by more than rounding them to bf16 did.
  void WidenSpan(Layer layer, int64_t head, Position begin, bool moved, const float* inv_freq,
                 std::vector<float>& k, std::vector<float>& v) const {
    const int64_t d = shape_.head_dim, n = static_cast<int64_t>(k.size()) / d;
    for (const Moved what : {kKeys, kValues}) {
      std::vector<float>& x = what == kKeys ? k : v;
      const kvstore::Rows& rows = rows_[static_cast<size_t>(2 * head + (what == kKeys ? 0 : 1))];
      rows.ForEachPiece({begin, begin + n},
                        [&](Position first, const void* address, int64_t count) {
                          WidenToFloat(DType::kBf16, address, count * d, &x[(first - begin) * d]);
                        });
      if (moved) MoveNumbers(SeedOf(layer, what), static_cast<float>(kRounding), n, d, x.data());
    }
    if (config_.key_position == KeyPosition::kNone) {
      kernels::Rope(k.data(), n, 1, d, begin, inv_freq);
    }
  }

  const model::Checkpoint& checkpoint_;
  const model::ModelConfig& model_;
  const AttentionShape& shape_;
  const kvstore::StoredContext& sealed_;
  const RecheckConfig& config_;
  const std::vector<Position> positions_;
  ThreadPool* const pool_;
  const int64_t m_;
  const int64_t width_;  // of a state
  const std::unique_ptr<model::Backend> backend_;
  std::vector<kvstore::Rows> rows_;  // of the layer: K and V of each head
  std::vector<float> entered_;       // the layer; nothing before the first
  std::vector<float> hidden_, q_, k_, v_, attended_;
  double worst_ = 0;
};

}  // namespace

bool CanRecheck(const AttentionConfig& attention) {
  return attention.kind == AttentionKind::kDense && attention.rope == model::Rope::kTrained;
}

uint64_t RecheckSeed(absl::string_view context_id) {
  uint64_t seed = 0;
  std::memcpy(&seed, context_id.data(), std::min(sizeof(seed), context_id.size()));
  return seed;
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
                               const kvstore::StoredContext& sealed, EnteringStates entering,
                               const RecheckConfig& config, ThreadPool* pool) {
  const auto all = static_cast<int64_t>(tokens.size());
  Rechecker rechecker(checkpoint, sealed, config, DrawPositions(all, config.tokens, config.seed),
                      pool);
  return rechecker.Run(tokens, entering);
}

}  // namespace carrel::prefill
