#include "kernels/attention/sparse_attention/sparse_spans.h"

#include <algorithm>

#include "kernels/attention/merge_states/merge_states.h"

namespace carrel::kernels {
namespace {

// So many rows take some microseconds, most of which a thread waits for memory. More spans than kMostSpans
// of each KV head give nobody work who had none.
constexpr int64_t kSpanRows = 128, kMostSpans = 16;

int64_t StateFloats(const SparseAttentionParams& p) { return p.group * (p.head_dim + 1); }

}  // namespace

int64_t SparseSpans(int64_t rows) {
  return std::clamp<int64_t>((rows + kSpanRows - 1) / kSpanRows, 1, kMostSpans);
}

int64_t SparseSpanFloats(const SparseAttentionParams& params) {
  return (SparseSpans(params.rows) - 1) * StateFloats(params);
}

void SparseAttentionSpan(const SparseAttentionParams& params, int64_t span, float* states) {
  const int64_t begin = SparseSpanBegin(params.rows, span);
  SparseAttentionParams of_span = params;
  of_span.rows = SparseSpanBegin(params.rows, span + 1) - begin;
  of_span.score_stride = params.score_stride == 0 ? params.rows : params.score_stride;
  if (params.k != nullptr) of_span.k = params.k + begin;
  of_span.v = params.v + begin;
  of_span.scores = params.scores + begin;
  if (span > 0) {  // the first one's state is where the merged one will be
    of_span.out = states + (span - 1) * StateFloats(params);
    of_span.lse = of_span.out + params.group * params.head_dim;
  }
  SparseAttention(of_span);
}

void MergeSparseSpans(const SparseAttentionParams& params, const float* states) {
  for (int64_t span = 1; span < SparseSpans(params.rows); ++span) {
    const float* const out = states + (span - 1) * StateFloats(params);
    MergeStates(params.out, params.lse, out, out + params.group * params.head_dim, params.group,
                params.head_dim);
  }
}

}  // namespace carrel::kernels
