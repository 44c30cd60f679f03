#include "kernels/attention/sparse_attention/sparse_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/sparse_attention/sparse_attention.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

void SparseAttentionImpl(const SparseAttentionParams& p) {
  const int64_t stride = p.score_stride == 0 ? p.rows : p.score_stride;
  if (p.k != nullptr) {
    const ScatteredRows<Bf16Element> k{p.k, p.head_dim};
    ScoreRows(k, p.rows, p.head_dim, p.q, p.group, p.head_dim, p.scale, p.scores, stride);
  }
  const ScatteredRows<Bf16Element> v{p.v, p.head_dim};
  AttendRows(v, p.rows, p.head_dim, p.scores, stride, p.group, p.out, p.lse);
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(SparseAttentionImpl);

void SparseAttention(const SparseAttentionParams& params) {
  HWY_DYNAMIC_DISPATCH(SparseAttentionImpl)(params);
}

}  // namespace carrel::kernels
#endif
