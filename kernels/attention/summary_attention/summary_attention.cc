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

void ScoreSummariesImpl(const SummaryScoreParams& p) {
  const ContiguousRows<Int8Element> keys{p.keys, p.head_dim};
  ScoreRows(keys, p.clusters, p.head_dim, p.q, p.group, p.head_dim, p.scale, p.scores, p.clusters);
  for (int64_t h = 0; h < p.group; ++h) {
    double norm = 0;
    for (int64_t i = 0; i < p.head_dim; ++i) {
      norm += double{p.q[h * p.head_dim + i]} * p.q[h * p.head_dim + i];
    }
    const auto half = static_cast<float>(norm * p.scale * p.scale / 2);
    float* scores = p.scores + h * p.clusters;
    for (int64_t c = 0; c < p.clusters; ++c) {
      scores[c] = scores[c] * p.key_scale[c] + p.spread[c] * half;
    }
  }
}

// e[h, c] of clusters that count, else 0: to `terms`, [heads, clusters].
void ExpOfCounted(const SummaryAttentionParams& p, const float* scores, int64_t heads, float* terms,
                  float* shift, double* sum) {
  const float lowest = -std::numeric_limits<float>::infinity();
  for (int64_t h = 0; h < heads; ++h) {
    float* e = terms + h * p.clusters;
    for (int64_t c = 0; c < p.clusters; ++c) {
      e[c] = p.rests[c] > 0 ? scores[h * p.clusters + c] : lowest;
    }
    shift[h] = SoftmaxShift(e, p.clusters);
    for (int64_t c = 0; c < p.clusters; c += kSumBlock) {
      ExpSum(e + c, std::min(kSumBlock, p.clusters - c), shift[h], e + c);
    }
    for (int64_t c = 0; c < p.clusters; ++c) sum[h] += double{e[c]} * p.rests[c];
  }
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
    rows.Prefetch(j + kRowBlock, p.rows, 0, 1);
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

// heads <= kHeadsPerPass. sums: as SumRows has them, or null.
void AttendHeadsOf(const SummaryAttentionParams& p, const float* scores, int64_t heads,
                   const float* sums, float* terms, float* out, float* lse) {
  const int64_t dim = p.head_dim;
  float weights[kHeadsPerPass * kRowBlock];
  float shift[kHeadsPerPass];
  double sum[kHeadsPerPass] = {};
  ExpOfCounted(p, scores, heads, terms, shift, sum);
  std::fill_n(out, heads * dim, 0.0f);
  const ContiguousRows<Int8Element> means{p.values, dim};
  for (int64_t at = 0; at < p.clusters; at += kRowBlock) {
    const int64_t end = std::min(p.clusters, at + kRowBlock);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t c = at; c < end; ++c) {
        weights[h * kRowBlock + c - at] =
            terms[h * p.clusters + c] * p.counts[c] * p.value_scale[c];
      }
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
    AttendHeadsOf(p, p.scores + h * p.clusters, std::min(kHeadsPerPass, p.group - h), sums, terms,
                  p.out + h * p.head_dim, p.lse + h);
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
