#include "kernels/encode/sign_moments/sign_moments.h"

#include <algorithm>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/encode/sign_moments/sign_moments.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// Rows whose signs in a column make one word.
inline constexpr int64_t kSignRows = 32;

// Words [columns] of at most kSignRows rows, whose numbers become signs. The rows' order within a
// word is of no account.
void TakeSigns(float* y, int64_t rows, int64_t columns, uint32_t* words) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec zero = hn::Zero(d), plus = hn::Set(d, 1.0f), minus = hn::Set(d, -1.0f);
  int64_t c = 0;
  for (; c + lanes <= columns; c += lanes) {
    auto word = hn::Zero(du);
    for (int64_t n = 0; n < rows; ++n) {
      float* const at = y + n * columns + c;
      const auto positive = hn::Gt(hn::LoadU(d, at), zero);
      hn::StoreU(hn::IfThenElse(positive, plus, minus), d, at);
      const auto ones = hn::BitCast(du, hn::VecFromMask(d, positive));  // all bits: minus 1
      word = hn::Sub(hn::Add(word, word), ones);
    }
    hn::StoreU(word, du, words + c);
  }
  for (; c < columns; ++c) {
    words[c] = 0;
    for (int64_t n = 0; n < rows; ++n) {
      float& at = y[n * columns + c];
      words[c] = 2 * words[c] + (at > 0 ? 1 : 0);
      at = at > 0 ? 1.0f : -1.0f;
    }
  }
}

// sums[j] += population of (word xor words[j]).
HWY_INLINE void AddPopulations(uint32_t word, const uint32_t* words, int64_t columns,
                               int32_t* sums) {
  const hn::ScalableTag<uint32_t> du;
  const hn::ScalableTag<int32_t> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(du));
  const auto all = hn::Set(du, word);
  int64_t j = 0;
  for (; j + lanes <= columns; j += lanes) {
    const auto bits = hn::PopulationCount(hn::Xor(all, hn::LoadU(du, words + j)));
    hn::StoreU(hn::Add(hn::LoadU(di, sums + j), hn::BitCast(di, bits)), di, sums + j);
  }
  for (; j < columns; ++j) sums[j] += static_cast<int32_t>(hwy::PopCount(word ^ words[j]));
}

void AddSignMomentsImpl(float* y, int64_t rows, int64_t columns, int32_t* positive,
                        int32_t* differ) {
  std::vector<uint32_t> words(static_cast<size_t>(columns));
  for (int64_t n = 0; n < rows; n += kSignRows) {
    TakeSigns(y + n * columns, std::min(kSignRows, rows - n), columns, words.data());
    AddPopulations(0, words.data(), columns, positive);
    for (int64_t i = 0; i < columns; ++i) {
      AddPopulations(words[static_cast<size_t>(i)], words.data(), columns, differ + i * columns);
    }
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(AddSignMomentsImpl);

void AddSignMoments(float* y, int64_t rows, int64_t columns, int32_t* positive, int32_t* differ) {
  HWY_DYNAMIC_DISPATCH(AddSignMomentsImpl)(y, rows, columns, positive, differ);
}

}  // namespace carrel::kernels
#endif
