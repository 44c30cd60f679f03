#include "kernels/attention/summary_attention/summary_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/summary_attention/summary_attention.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

struct Int8Element : ElementOf<Int8Element, 1> {
  static HWY_INLINE FloatVec Load(FloatTag d, const uint8_t* row, int64_t index) {
    const hn::Rebind<int8_t, FloatTag> d8;
    const hn::Rebind<int32_t, FloatTag> d32;
    const auto bytes = hn::LoadU(d8, reinterpret_cast<const int8_t*>(row + index));
    return hn::ConvertTo(d, hn::PromoteTo(d32, bytes));
  }
};

// In four sums: one would wait for each addition.
double SquaredLength(const float* x, int64_t dim) {
  double sum[4] = {};
  int64_t i = 0;
  for (; i + 4 <= dim; i += 4) {
    for (int64_t j = 0; j < 4; ++j) sum[j] += double{x[i + j]} * x[i + j];
  }
  for (; i < dim; ++i) sum[0] += double{x[i]} * x[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// A row weighs what its cluster's term is.
struct ClusterWeights {
  const float* terms;  // [heads, kMaxSummaryClusters]
  const uint8_t* row_cluster;
  HWY_INLINE float At(int64_t h, int64_t j) const {
    return terms[h * kMaxSummaryClusters + row_cluster[j]];
  }
};

// Heads whose sums over rows stand side by side: a row adds to those of its cluster all at once.
constexpr int64_t kHeadsAbreast = 4;

// The `count` <= Lanes elements at x.
HWY_INLINE FloatVec LoadUpTo(FloatTag d, const float* x, int64_t count) {
  return count == static_cast<int64_t>(hn::Lanes(d)) ? hn::LoadU(d, x) : LoadPartial(d, x, count);
}

HWY_INLINE void StoreUpTo(FloatTag d, FloatVec v, float* x, int64_t count) {
  if (count == static_cast<int64_t>(hn::Lanes(d))) {
    hn::StoreU(v, d, x);
  } else {
    StorePartial(d, v, x, count);
  }
}

// Of kHeadsAbreast heads: [clusters, heads].
struct RowSums {
  HWY_ALIGN float mean[kMaxSummaryClusters * kHeadsAbreast];
  HWY_ALIGN float sum[kMaxSummaryClusters * kHeadsAbreast];
  HWY_ALIGN float squares[kMaxSummaryClusters * kHeadsAbreast];
};

// head(i): of kHeadsAbreast, the last of the group for those that there are not.
template <class Head>
void SumRowScores(const SummaryScoreParams& p, const Head& head, RowSums& sums) {
  const FloatTag d;
  const hn::CappedTag<float, kHeadsAbreast> dh;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t c = 0; c < p.clusters; c += lanes) {
    const int64_t count = std::min(lanes, p.clusters - c);
    const FloatVec scale = LoadUpTo(d, p.key_scale + c, count);
    const auto mean = [&](int64_t i) HWY_ATTR {
      return hn::Mul(LoadUpTo(d, p.scores + head(i) * p.clusters + c, count), scale);
    };
    hn::StoreInterleaved4(mean(0), mean(1), mean(2), mean(3), d, sums.mean + kHeadsAbreast * c);
  }
  std::fill(std::begin(sums.sum), std::end(sums.sum), 0.0f);
  std::fill(std::begin(sums.squares), std::end(sums.squares), 0.0f);
  HWY_ALIGN float scores[kHeadsAbreast * HWY_MAX_BYTES / sizeof(float)];
  for (int64_t j = 0; j < p.rows; j += lanes) {
    const int64_t count = std::min(lanes, p.rows - j);
    const auto score = [&](int64_t i) HWY_ATTR {
      const float* const of_head = p.row_scores + head(i) * p.row_score_stride + j;
      return hn::Sub(LoadUpTo(d, of_head, count), hn::Set(d, p.base[head(i)]));
    };
    hn::StoreInterleaved4(score(0), score(1), score(2), score(3), d, scores);
    for (int64_t i = 0; i < kHeadsAbreast * count; i += static_cast<int64_t>(hn::Lanes(dh))) {
      const int64_t at = kHeadsAbreast * p.row_cluster[j + i / kHeadsAbreast] + i % kHeadsAbreast;
      const auto away = hn::Sub(hn::Load(dh, scores + i), hn::Load(dh, sums.mean + at));
      hn::Store(hn::Add(hn::Load(dh, sums.sum + at), away), dh, sums.sum + at);
      hn::Store(hn::MulAdd(away, away, hn::Load(dh, sums.squares + at)), dh, sums.squares + at);
    }
  }
}

// scores: inner products before, for heads [h, h + kHeadsAbreast) of the group.
void FinishScores(const SummaryScoreParams& p, int64_t h) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d)), last = p.group - 1;
  const auto head = [=](int64_t i) { return std::min(h + i, last); };
  RowSums sums;
  if (p.rows > 0) SumRowScores(p, head, sums);
  float of_spread[kHeadsAbreast];
  for (int64_t i = 0; i < kHeadsAbreast; ++i) {
    const double squared = SquaredLength(p.q + head(i) * p.head_dim, p.head_dim);
    of_spread[i] = static_cast<float>(squared * p.scale * p.scale * p.share);
  }
  for (int64_t c = 0; c < p.clusters; c += lanes) {
    const int64_t n = std::min(lanes, p.clusters - c);
    const FloatVec scale = LoadUpTo(d, p.key_scale + c, n), spread = LoadUpTo(d, p.spread + c, n);
    const FloatVec zero = hn::Zero(d), half = hn::Set(d, 0.5f);
    FloatVec left = zero, count = zero;
    FloatVec sum[kHeadsAbreast] = {zero, zero, zero, zero};
    FloatVec squares[kHeadsAbreast] = {zero, zero, zero, zero};
    if (p.rows > 0) {
      left = LoadUpTo(d, p.left + c, n);
      count = LoadUpTo(d, p.counts + c, n);
      const int64_t at = kHeadsAbreast * c;
      hn::LoadInterleaved4(d, sums.sum + at, sum[0], sum[1], sum[2], sum[3]);
      hn::LoadInterleaved4(d, sums.squares + at, squares[0], squares[1], squares[2], squares[3]);
    }
    const auto changed = hn::And(hn::Gt(left, zero), hn::Lt(left, count));
    const FloatVec inverse = hn::Div(hn::Set(d, 1.0f), left);  // not used where nothing is left
    for (int64_t i = 0; i < kHeadsAbreast && h + i < p.group; ++i) {
      float* const scores = p.scores + (h + i) * p.clusters + c;
      const FloatVec mean = hn::Mul(LoadUpTo(d, scores, n), scale);
      const FloatVec variance = hn::Mul(spread, hn::Set(d, of_spread[i]));
      const FloatVec shift = hn::Min(hn::Mul(hn::Neg(sum[i]), inverse), zero);
      const FloatVec square = hn::Mul(hn::MulSub(count, variance, squares[i]), inverse);
      const FloatVec rest = hn::Min(hn::Max(hn::NegMulAdd(shift, shift, square), zero), variance);
      const FloatVec score = hn::MulAdd(hn::IfThenElse(changed, rest, variance), half,
                                        hn::Add(mean, hn::IfThenElseZero(changed, shift)));
      StoreUpTo(d, score, scores, n);
    }
  }
}

void ScoreSummariesImpl(const SummaryScoreParams& p) {
  const ContiguousRows<Int8Element> keys{p.keys, p.head_dim};
  ScoreRows(keys, p.clusters, p.head_dim, p.q, p.group, p.head_dim, p.scale, p.scores, p.clusters);
  for (int64_t h = 0; h < p.group; h += kHeadsAbreast) FinishScores(p, h);
}

// out[c] = min(score, bound), or -inf where the cluster does not count, and behind the last one up to
// a whole vector. Returns the shift.
float TakeCounted(const SummaryAttentionParams& p, const float* scores, float bound, float* out) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  const FloatVec most = hn::Set(d, bound);
  for (int64_t c = 0; c < p.clusters; c += lanes) {
    const int64_t n = std::min(lanes, p.clusters - c);
    const FloatVec score = LoadUpTo(d, scores + c, n), rest = LoadUpTo(d, p.rests + c, n);
    const FloatVec bounded = hn::IfThenElse(hn::Lt(most, score), most, score);
    hn::StoreU(hn::IfThenElse(hn::Gt(rest, hn::Zero(d)), bounded, lowest), d, out + c);
  }
  return SoftmaxShift(out, p.clusters);
}

// terms[c] = e[c] of clusters that count, else 0; weights[c] = what the mean of V weighs in the sum
// of terms, row_weight apart. Returns sum_c rests[c] e[c]: at most kSumBlock terms, none negative.
float WeighClusters(const SummaryAttentionParams& p, float shift, float* terms, float* weights) {
  static_assert(kMaxSummaryClusters <= kSumBlock);
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec shifts = hn::Set(d, shift), sign = hn::Set(d, p.row_weight);
  FloatVec sum = hn::Zero(d);
  for (int64_t c = 0; c < p.clusters; c += lanes) {
    const int64_t n = std::min(lanes, p.clusters - c);
    const FloatVec e = ExpBelow(d, hn::Sub(hn::LoadU(d, terms + c), shifts));
    const FloatVec scale = hn::Mul(LoadUpTo(d, p.value_scale + c, n), sign);
    sum = hn::MulAdd(e, LoadUpTo(d, p.rests + c, n), sum);
    hn::StoreU(e, d, terms + c);
    hn::StoreU(hn::Mul(hn::Mul(e, LoadUpTo(d, p.counts + c, n)), scale), d, weights + c);
  }
  return SumOfLanes1(d, sum);
}

// Some columns of rows that lie one behind the other, or anywhere.
template <class E>
struct ColumnsOfRows {
  using Element = E;
  const uint8_t* data;
  int64_t stride, dim;
  const uint8_t* Row(int64_t j) const { return data + j * stride * E::kBytes; }
  static constexpr int64_t kAhead = ContiguousRows<E>::kAhead;
  HWY_INLINE void Prefetch(int64_t j, int64_t count) const {
    if (j >= count) return;
    for (int64_t b = 0; b < dim * E::kBytes; b += 64) PrefetchToL2(Row(j) + b);
  }
};

struct ColumnsOfScattered {
  using Element = Bf16Element;
  const void* const* rows;
  int64_t first, dim;
  const uint8_t* Row(int64_t j) const {
    return static_cast<const uint8_t*>(rows[j]) + first * Element::kBytes;
  }
  static constexpr int64_t kAhead = ScatteredRows<Element>::kAhead;
  HWY_INLINE void Prefetch(int64_t j, int64_t count) const {
    if (j >= count) return;
    const int64_t bytes = dim * Element::kBytes;
    for (int64_t b = 0; b < bytes; b += 64) PrefetchToL2(Row(j) + b);
    PrefetchToL2(Row(j) + bytes - 1);
  }
};

int64_t ColumnsOf(const SummaryAttentionParams& p) {
  return p.columns > 0 ? p.columns : p.head_dim - p.first_column;
}

// Rows of a cluster count alike: where they are many, they are added up once for all heads.
bool SumsRows(const SummaryAttentionParams& p) { return p.rows >= 2 * p.clusters; }

// sums[c] = sum of v[j] over rows of cluster c, [clusters, columns]; of clusters that do not count, 0.
void SumRows(const SummaryAttentionParams& p, float* sums) {
  const FloatTag d;
  const int64_t dim = ColumnsOf(p), lanes = static_cast<int64_t>(hn::Lanes(d));
  std::fill_n(sums, p.clusters * dim, 0.0f);
  const ColumnsOfScattered rows{p.v, p.first_column, dim};
  for (int64_t j = 0; j < p.rows; ++j) {
    rows.Prefetch(j + kRowBlock, p.rows);
    if (p.rests[p.row_cluster[j]] <= 0) continue;
    const uint8_t* const row = rows.Row(j);
    float* const sum = sums + p.row_cluster[j] * dim;
    int64_t c = 0;
    for (; c + lanes <= dim; c += lanes) AddTo(d, Bf16Element::Load(d, row, c), sum + c);
    if (c == dim) continue;
    const FloatVec tail = Bf16Element::LoadPartial(d, row, c, dim - c);
    StorePartial(d, hn::Add(tail, LoadPartial(d, sum + c, dim - c)), sum + c, dim - c);
  }
}

template <class Rows, class Weights>
HWY_INLINE void AddRowsInBlocks(const Rows& rows, int64_t count, int64_t dim,
                                const Weights& weights, int64_t heads, float* out,
                                int64_t out_stride) {
  for (int64_t at = 0; at < count; at += kRowBlock) {
    const int64_t end = std::min(count, at + kRowBlock);
    AddWeightedRows(rows, at, end, count, dim, weights, heads, out, out_stride);
  }
}

// heads <= kHeadsPerPass. sums: as SumRows has them, or null.
void AttendHeadsOf(const SummaryAttentionParams& p, const float* scores, const float* bound,
                   int64_t heads, const float* sums, float* scratch, float* out, float* lse) {
  const int64_t dim = ColumnsOf(p), stride = kMaxSummaryClusters, out_stride = p.head_dim;
  float* const terms = scratch;
  float* const weights = scratch + heads * stride;
  float shift[kHeadsPerPass], sum[kHeadsPerPass];
  for (int64_t h = 0; h < heads; ++h) {
    const float most = bound == nullptr ? std::numeric_limits<float>::infinity() : bound[h];
    shift[h] = TakeCounted(p, scores + h * p.clusters, most, terms + h * stride);
    sum[h] = WeighClusters(p, shift[h], terms + h * stride, weights + h * stride);
  }
  for (int64_t h = 0; h < heads; ++h) std::fill_n(out + h * out_stride, dim, 0.0f);
  const ColumnsOfRows<Int8Element> means{static_cast<const uint8_t*>(p.values) + p.first_column,
                                         p.head_dim, dim};
  AddRowsInBlocks(means, p.clusters, dim, StridedWeights{weights, stride, 0}, heads, out,
                  out_stride);
  if (sums != nullptr) {
    const ContiguousRows<F32Element> of_clusters{sums, dim};
    AddRowsInBlocks(of_clusters, p.clusters, dim, StridedWeights{terms, stride, 0}, heads, out,
                    out_stride);
  } else {
    const ColumnsOfScattered rows{p.v, p.first_column, dim};
    AddRowsInBlocks(rows, p.rows, dim, ClusterWeights{terms, p.row_cluster}, heads, out,
                    out_stride);
  }
  for (int64_t h = 0; h < heads; ++h) {
    lse[h] = static_cast<float>(shift[h] + std::log(double{sum[h]}));
    const float factor = sum[h] == 0 ? 0.0f : static_cast<float>(p.row_weight / double{sum[h]});
    for (int64_t i = 0; i < dim; ++i) out[h * out_stride + i] *= factor;
  }
}

void AttendSummariesImpl(const SummaryAttentionParams& p, float* scratch) {
  float* const sums = SumsRows(p) ? scratch : nullptr;
  float* const of_heads = scratch + (sums != nullptr ? p.clusters * ColumnsOf(p) : 0);
  if (sums != nullptr) SumRows(p, sums);
  for (int64_t h = 0; h < p.group; h += kHeadsPerPass) {
    AttendHeadsOf(p, p.scores + h * p.clusters, p.bound == nullptr ? nullptr : p.bound + h,
                  std::min(kHeadsPerPass, p.group - h), sums, of_heads,
                  p.out + h * p.head_dim + p.first_column, p.lse + h);
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(ScoreSummariesImpl);
HWY_EXPORT(AttendSummariesImpl);

void ScoreSummaries(const SummaryScoreParams& params) {
  HWY_DYNAMIC_DISPATCH(ScoreSummariesImpl)(params);
}

int64_t SummaryAttentionScratchFloats(const SummaryAttentionParams& params) {
  return 2 * std::min<int64_t>(params.group, 16) * kMaxSummaryClusters +
         (params.columns > 0 ? params.columns : params.head_dim) * params.clusters;
}

void AttendSummaries(const SummaryAttentionParams& params, float* scratch) {
  HWY_DYNAMIC_DISPATCH(AttendSummariesImpl)(params, scratch);
}

}  // namespace carrel::kernels
#endif
