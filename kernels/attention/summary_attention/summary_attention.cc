#include "kernels/attention/summary_attention/summary_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/summary_attention/summary_attention.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

struct Int8Element {
  static constexpr int64_t kBytes = 1;
  static HWY_INLINE FloatVec Load(FloatTag d, const uint8_t* row, int64_t index) {
    const hn::Rebind<int8_t, FloatTag> d8;
    const hn::Rebind<int32_t, FloatTag> d32;
    const auto bytes = hn::LoadU(d8, reinterpret_cast<const int8_t*>(row + index));
    return hn::ConvertTo(d, hn::PromoteTo(d32, bytes));
  }
  static HWY_INLINE FloatVec LoadPartial(FloatTag d, const uint8_t* row, int64_t index,
                                         int64_t count) {
    HWY_ALIGN uint8_t lanes[HWY_MAX_BYTES] = {};
    std::memcpy(lanes, row + index, static_cast<size_t>(count));
    return Load(d, lanes, 0);
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

// scores[c] = scores[c] key_scale[c] + spread[c] half
void AddSpread(const SummaryScoreParams& p, float half, float* scores) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto add = [&](FloatVec score, FloatVec scale, FloatVec spread) HWY_ATTR {
    return hn::MulAdd(score, scale, hn::Mul(spread, hn::Set(d, half)));
  };
  int64_t c = 0;
  for (; c + lanes <= p.clusters; c += lanes) {
    hn::StoreU(
        add(hn::LoadU(d, scores + c), hn::LoadU(d, p.key_scale + c), hn::LoadU(d, p.spread + c)), d,
        scores + c);
  }
  if (const int64_t left = p.clusters - c; left > 0) {
    StorePartial(d,
                 add(LoadPartial(d, scores + c, left), LoadPartial(d, p.key_scale + c, left),
                     LoadPartial(d, p.spread + c, left)),
                 scores + c, left);
  }
}

void ScoreSummariesImpl(const SummaryScoreParams& p) {
  const ContiguousRows<Int8Element> keys{p.keys, p.head_dim};
  ScoreRows(keys, p.clusters, p.head_dim, p.q, p.group, p.head_dim, p.scale, p.scores, p.clusters);
  for (int64_t h = 0; h < p.group; ++h) {
    const auto half =
        static_cast<float>(SquaredLength(p.q + h * p.head_dim, p.head_dim) * p.scale * p.scale / 2);
    AddSpread(p, half, p.scores + h * p.clusters);
  }
}

// out[c] = min(score, bound), or -inf where the cluster does not count.
void TakeCounted(const SummaryAttentionParams& p, const float* scores, float bound, float* out) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  const FloatVec most = hn::Set(d, bound);
  const auto take = [&](FloatVec rest, FloatVec score) HWY_ATTR {
    const FloatVec bounded = hn::IfThenElse(hn::Lt(most, score), most, score);
    return hn::IfThenElse(hn::Gt(rest, hn::Zero(d)), bounded, lowest);
  };
  int64_t c = 0;
  for (; c + lanes <= p.clusters; c += lanes) {
    hn::StoreU(take(hn::LoadU(d, p.rests + c), hn::LoadU(d, scores + c)), d, out + c);
  }
  if (const int64_t left = p.clusters - c; left > 0) {
    StorePartial(d, take(LoadPartial(d, p.rests + c, left), LoadPartial(d, scores + c, left)),
                 out + c, left);
  }
}

// sum[h] += sum_c rests[c] terms[h, c], in order of c. Heads side by side: one alone waits for each
// addition.
template <int kHeads>
void SumTerms(const SummaryAttentionParams& p, const float* terms, double* sum) {
  double sums[kHeads];
  for (int h = 0; h < kHeads; ++h) sums[h] = sum[h];
  for (int64_t c = 0; c < p.clusters; ++c) {
    const double rest = p.rests[c];
    for (int h = 0; h < kHeads; ++h) sums[h] += terms[h * p.clusters + c] * rest;
  }
  for (int h = 0; h < kHeads; ++h) sum[h] = sums[h];
}

// e[h, c] of clusters that count, else 0: to `terms`, [heads, clusters].
void ExpOfCounted(const SummaryAttentionParams& p, const float* scores, const float* bound,
                  int64_t heads, float* terms, float* shift, double* sum) {
  for (int64_t h = 0; h < heads; ++h) {
    float* e = terms + h * p.clusters;
    TakeCounted(p, scores + h * p.clusters,
                bound == nullptr ? std::numeric_limits<float>::infinity() : bound[h], e);
    shift[h] = SoftmaxShift(e, p.clusters);
    for (int64_t c = 0; c < p.clusters; c += kSumBlock) {
      ExpSum(e + c, std::min(kSumBlock, p.clusters - c), shift[h], e + c);
    }
  }
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) SumTerms<4>(p, terms + h * p.clusters, sum + h);
  for (; h < heads; ++h) SumTerms<1>(p, terms + h * p.clusters, sum + h);
}

// Rows of a cluster count alike: where they are many, they are added up once for all heads.
bool SumsRows(const SummaryAttentionParams& p) { return p.rows >= 2 * p.clusters; }

// sums[c] = sum of row_weight[j] v[j] over rows of cluster c, [clusters, head_dim]; of clusters that
// do not count, 0.
void SumRows(const SummaryAttentionParams& p, float* sums) {
  const FloatTag d;
  const int64_t dim = p.head_dim, lanes = static_cast<int64_t>(hn::Lanes(d));
  std::fill_n(sums, p.clusters * dim, 0.0f);
  const ScatteredRows<Bf16Element> rows{p.v, dim};
  for (int64_t j = 0; j < p.rows; ++j) {
    rows.Prefetch(j + kRowBlock, p.rows);
    if (p.rests[p.row_cluster[j]] <= 0) continue;
    const uint8_t* const row = rows.Row(j);
    float* const sum = sums + p.row_cluster[j] * dim;
    const FloatVec weight = hn::Set(d, p.row_weight[j]);
    int64_t c = 0;
    for (; c + lanes <= dim; c += lanes) {
      hn::StoreU(hn::MulAdd(weight, Bf16Element::Load(d, row, c), hn::LoadU(d, sum + c)), d,
                 sum + c);
    }
    if (c == dim) continue;
    const FloatVec tail = Bf16Element::LoadPartial(d, row, c, dim - c);
    StorePartial(d, hn::MulAdd(weight, tail, LoadPartial(d, sum + c, dim - c)), sum + c, dim - c);
  }
}

// weights[c - at] = terms[c] counts[c] value_scale[c] of clusters [at, end).
void WeighMeans(const SummaryAttentionParams& p, const float* terms, int64_t at, int64_t end,
                float* weights) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t c = at;
  for (; c + lanes <= end; c += lanes) {
    const FloatVec counted = hn::Mul(hn::LoadU(d, terms + c), hn::LoadU(d, p.counts + c));
    hn::StoreU(hn::Mul(counted, hn::LoadU(d, p.value_scale + c)), d, weights + c - at);
  }
  for (; c < end; ++c) weights[c - at] = terms[c] * p.counts[c] * p.value_scale[c];
}

// heads <= kHeadsPerPass. sums: as SumRows has them, or null.
void AttendHeadsOf(const SummaryAttentionParams& p, const float* scores, const float* bound,
                   int64_t heads, const float* sums, float* terms, float* out, float* lse) {
  const int64_t dim = p.head_dim;
  float weights[kHeadsPerPass * kRowBlock];
  float shift[kHeadsPerPass];
  double sum[kHeadsPerPass] = {};
  ExpOfCounted(p, scores, bound, heads, terms, shift, sum);
  std::fill_n(out, heads * dim, 0.0f);
  const ContiguousRows<Int8Element> means{p.values, dim};
  for (int64_t at = 0; at < p.clusters; at += kRowBlock) {
    const int64_t end = std::min(p.clusters, at + kRowBlock);
    for (int64_t h = 0; h < heads; ++h) {
      WeighMeans(p, terms + h * p.clusters, at, end, weights + h * kRowBlock);
    }
    AddWeightedRows(means, at, end, p.clusters, dim, weights, heads, kRowBlock, out, dim);
  }
  const ContiguousRows<F32Element> of_clusters{sums, dim};
  for (int64_t at = 0; sums != nullptr && at < p.clusters; at += kRowBlock) {
    const int64_t end = std::min(p.clusters, at + kRowBlock);
    AddWeightedRows(of_clusters, at, end, p.clusters, dim, terms + at, heads, p.clusters, out, dim);
  }
  const ScatteredRows<Bf16Element> rows{p.v, dim};
  for (int64_t at = 0; sums == nullptr && at < p.rows; at += kRowBlock) {
    const int64_t end = std::min(p.rows, at + kRowBlock);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t j = at; j < end; ++j) {
        weights[h * kRowBlock + j - at] =
            terms[h * p.clusters + p.row_cluster[j]] * p.row_weight[j];
      }
    }
    AddWeightedRows(rows, at, end, p.rows, dim, weights, heads, kRowBlock, out, dim);
  }
  for (int64_t h = 0; h < heads; ++h) {
    lse[h] = static_cast<float>(shift[h] + std::log(sum[h]));
    const float factor = sum[h] == 0 ? 0.0f : static_cast<float>(1.0 / sum[h]);
    for (int64_t i = 0; i < dim; ++i) out[h * dim + i] *= factor;
  }
}

void AttendSummariesImpl(const SummaryAttentionParams& p, float* scratch) {
  float* const sums = SumsRows(p) ? scratch : nullptr;
  float* const terms = sums != nullptr ? scratch + p.clusters * p.head_dim : scratch;
  if (sums != nullptr) SumRows(p, sums);
  for (int64_t h = 0; h < p.group; h += kHeadsPerPass) {
    AttendHeadsOf(p, p.scores + h * p.clusters, p.bound == nullptr ? nullptr : p.bound + h,
                  std::min(kHeadsPerPass, p.group - h), sums, terms, p.out + h * p.head_dim,
                  p.lse + h);
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
  return (std::min<int64_t>(params.group, 16) + params.head_dim) * params.clusters;
}

void AttendSummaries(const SummaryAttentionParams& params, float* scratch) {
  HWY_DYNAMIC_DISPATCH(AttendSummariesImpl)(params, scratch);
}

}  // namespace carrel::kernels
#endif
