#include "kernels/attention/window_attention/window_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/window_attention/window_attention.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

template <class Element>
void Attend(const WindowAttentionParams& p, float* scratch) {
  const ContiguousRows<Element> k{p.k, p.head_dim}, v{p.v, p.head_dim};
  ScoreRows(k, p.rows, p.head_dim, p.q, p.group, p.head_dim, p.scale, scratch, p.rows);
  AttendRows(v, p.rows, p.head_dim, scratch, p.rows, p.group, p.out, p.lse);
}

void WindowAttentionImpl(const WindowAttentionParams& p, float* scratch) {
  p.bf16 ? Attend<Bf16Element>(p, scratch) : Attend<F32Element>(p, scratch);
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(WindowAttentionImpl);

void WindowAttention(const WindowAttentionParams& params, float* scratch) {
  HWY_DYNAMIC_DISPATCH(WindowAttentionImpl)(params, scratch);
}

}  // namespace carrel::kernels
#endif
