// Where bytes can be multiplied (AVX-512 VNNI), four products add up in a row's own lane: unsigned
// by signed ones only, so that a query's low bytes meet a row's numbers, and a row's numbers plus
// 128 the query's high bytes. Elsewhere numbers are widened to 16 bits as they are loaded; pairs of
// products add up in the 32 bits of a lane, of which two belong to a row.
#include "kernels/score/int8_score/int8_score.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/score/int8_score/int8_score_amx.h"

// Highway leaves this target out unless it is asked for.
#define HWY_WANT_AVX3_DL 1

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/score/int8_score/int8_score.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// Loops over what lives in registers.
#undef CARREL_UNROLL
#define CARREL_UNROLL _Pragma("GCC unroll 8")

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR

using Int8SumTag = hn::CappedTag<int32_t, 16>;
using Int8WideTag = hn::Repartition<int16_t, Int8SumTag>;
using Int8NarrowTag = hn::Rebind<int8_t, Int8WideTag>;

// Rows are asked for this far ahead: the hardware's own prefetch stops at each page. Asking for
// what lies behind the last block is harmless.
inline constexpr int64_t kInt8PrefetchBytes = 8192;

#if HWY_TARGET <= HWY_AVX3_DL && HWY_COMPILER_GCC_ACTUAL

static_assert(kInt8BlockRows == 16);

// sum + the products of four unsigned and four signed bytes in each lane. By hand: of the intrinsic GCC 12 copies
// every sum, and keeps some in memory.
__attribute__((target("avx512vnni"))) HWY_INLINE void AddFours(__m512i& sum, __m512i unsigned_bytes,
                                                               __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

HWY_INLINE __m512i SpreadFour(const uint8_t* bytes) {
  __m512i spread;
  asm("vpbroadcastd %1, %0" : "=v"(spread) : "m"(*reinterpret_cast<const uint8_t(*)[4]>(bytes)));
  return spread;
}

// Blocks that meet a query's bytes once they are spread, which costs as much as to multiply them: so
// many where queries pass over them several times. The first pass waits for memory, and one stream
// is foreseen better than two.
inline constexpr int kInt8Together = 2;

// kHeads queries from `head` on with kBlocks blocks; out at the first one's first row. Highway's
// AVX3_DL is chosen where there is VNNI, but does not tell the compiler.
template <int kHeads, int kBlocks>
__attribute__((target("avx512vnni"), noinline)) void Int8Heads(const Int8Queries& q, int64_t head,
                                                               const uint8_t* block, float* out,
                                                               int64_t stride) {
  const int64_t fours = (q.dim + 3) / 4, block_bytes = Int8BlockBytes(q.dim);
  const __m512i sign = _mm512_set1_epi8(-128);
  __m512i low[kHeads][kBlocks], high[kHeads][kBlocks];
  CARREL_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    CARREL_UNROLL
    for (int b = 0; b < kBlocks; ++b) low[h][b] = high[h][b] = _mm512_setzero_si512();
  }
  const uint8_t* numbers = block + 64;
  const uint8_t* bytes = q.bytes.data() + head * 8 * fours;
  for (int64_t four = 0; four < fours; ++four) {
    __m512i rows[kBlocks], above[kBlocks];  // above: + 128, unsigned
    CARREL_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      // In the order in which they lie, and into the L1 cache: what lies in the L2 cache only is waited for.
      __builtin_prefetch(numbers + kInt8PrefetchBytes + 64 * (kBlocks * four + b), 0, 3);
      rows[b] = _mm512_loadu_si512(numbers + b * block_bytes + 64 * four);
      above[b] = _mm512_xor_si512(rows[b], sign);
    }
    CARREL_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const uint8_t* const query = bytes + 8 * (h * fours + four);
      const __m512i query_low = SpreadFour(query), query_high = SpreadFour(query + 4);
      CARREL_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        AddFours(low[h][b], query_low, rows[b]);
        AddFours(high[h][b], above[b], query_high);
      }
    }
  }
  CARREL_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    const auto at = static_cast<size_t>(head + h);
    CARREL_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      // Whatever leaves 32 bits on the way comes back: the sum does not.
      const __m512i signed_high =
          _mm512_sub_epi32(high[h][b], _mm512_set1_epi32(128 * q.high_sum[at]));
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(signed_high, 8), low[h][b]);
      const __m512 scale = _mm512_loadu_ps(block + b * block_bytes);
      const __m512 scaled =
          _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale), _mm512_set1_ps(q.scale[at]));
      _mm512_storeu_ps(out + h * stride + b * kInt8BlockRows, scaled);
    }
  }
}

#else

inline constexpr int kInt8Together = 1;

// kHeads queries from `head` on with one block; out at the block's first row.
template <int kHeads, int kBlocks>
HWY_INLINE void Int8Heads(const Int8Queries& q, int64_t head, const uint8_t* block, float* out,
                          int64_t stride) {
  const Int8SumTag d32;
  const Int8WideTag d16;
  const Int8NarrowTag d8;
  const hn::Repartition<int64_t, Int8SumTag> d64;
  const hn::RebindToFloat<Int8SumTag> df;
  const hn::Repartition<uint8_t, Int8SumTag> d_bytes;
  using Sum = hn::Vec<Int8SumTag>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d32)), fours = (q.dim + 3) / 4;
  // Two vectors of half the lanes' rows each make a vector of rows.
  for (int64_t row = 0; row < kInt8BlockRows; row += lanes) {
    Sum low[kHeads], low_more[kHeads], high[kHeads], high_more[kHeads];
    CARREL_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      low[h] = low_more[h] = high[h] = high_more[h] = hn::Zero(d32);
    }
    const auto* numbers = reinterpret_cast<const int8_t*>(block + 64 + 4 * row);
    const int16_t* values = q.values.data() + head * 4 * fours;
    for (int64_t four = 0; four < fours; ++four) {
      hwy::Prefetch(numbers + 64 * four + kInt8PrefetchBytes);
      const auto rows_low = hn::PromoteTo(d16, hn::LoadU(d8, numbers + 64 * four));
      const auto rows_high = hn::PromoteTo(d16, hn::LoadU(d8, numbers + 64 * four + 2 * lanes));
      CARREL_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        int64_t bits;
        std::memcpy(&bits, values + 4 * (h * fours + four), sizeof(bits));
        const auto query = hn::BitCast(d16, hn::Set(d64, bits));
        low[h] = hn::ReorderWidenMulAccumulate(d32, rows_low, query, low[h], low_more[h]);
        high[h] = hn::ReorderWidenMulAccumulate(d32, rows_high, query, high[h], high_more[h]);
      }
    }
    const auto scale = hn::BitCast(df, hn::LoadU(d_bytes, block + 4 * row));
    CARREL_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const Sum a = hn::RearrangeToOddPlusEven(low[h], low_more[h]);
      const Sum b = hn::RearrangeToOddPlusEven(high[h], high_more[h]);
      const Sum sum = hn::Add(hn::ConcatEven(d32, b, a), hn::ConcatOdd(d32, b, a));
      const auto scaled = hn::Mul(hn::Mul(hn::ConvertTo(df, sum), scale),
                                  hn::Set(df, q.scale[static_cast<size_t>(head + h)]));
      hn::StoreU(scaled, df, out + h * stride + row);
    }
  }
}

#endif

// What sums of squares lose by rounding.
inline constexpr float kInt8Slack = 1.0001f;

Int8Error PackInt8Impl(const float* rows, int64_t count, int64_t dim, void* block) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> d32;
  const hn::Rebind<int8_t, decltype(d)> d8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d)), whole = dim / lanes * lanes;
  auto* bytes = static_cast<char*>(block);
  std::memset(bytes, 0, static_cast<size_t>(Int8BlockBytes(dim)));
  float largest_residual = 0, largest_norm = 0;
  std::vector<int8_t> numbers(static_cast<size_t>((dim + 3) / 4 * 4));
  for (int64_t r = 0; r < count; ++r) {
    const float* row = rows + r * dim;
    auto most = hn::Zero(d), squares = hn::Zero(d);
    for (int64_t c = 0; c < whole; c += lanes) {
      const auto x = hn::LoadU(d, row + c);
      most = hn::Max(most, hn::Abs(x));
      squares = hn::MulAdd(x, x, squares);
    }
    float largest = hn::GetLane(hn::MaxOfLanes(d, most));
    float norm = hn::GetLane(hn::SumOfLanes(d, squares));
    for (int64_t c = whole; c < dim; ++c) {
      largest = std::max(largest, std::abs(row[c]));
      norm += row[c] * row[c];
    }
    largest_norm = std::max(largest_norm, norm);
    const float scale = largest / 127;
    if (!(scale > 0)) {  // zeros, or too small for a scale
      largest_residual = std::max(largest_residual, norm);
      continue;
    }
    auto lost = hn::Zero(d);
    const auto scales = hn::Set(d, scale), bound = hn::Set(d, 127.0f);
    for (int64_t c = 0; c < whole; c += lanes) {
      const auto x = hn::LoadU(d, row + c);
      const auto number = hn::Clamp(hn::Round(hn::Div(x, scales)), hn::Neg(bound), bound);
      const auto left = hn::NegMulAdd(number, scales, x);
      lost = hn::MulAdd(left, left, lost);
      hn::StoreU(hn::DemoteTo(d8, hn::ConvertTo(d32, number)), d8,
                 &numbers[static_cast<size_t>(c)]);
    }
    float residual = hn::GetLane(hn::SumOfLanes(d, lost));
    for (int64_t c = whole; c < dim; ++c) {
      const float number = std::clamp(std::nearbyint(row[c] / scale), -127.0f, 127.0f);
      // Rounded once, as above, whether or not the compiler would join the two: else it may be too small.
      const float left = std::fma(-number, scale, row[c]);
      residual += left * left;
      numbers[static_cast<size_t>(c)] = static_cast<int8_t>(number);
    }
    largest_residual = std::max(largest_residual, residual);
    std::memcpy(bytes + 4 * r, &scale, sizeof(scale));
    char* to = bytes + 64 + 4 * r;
    for (size_t c = 0; c < numbers.size(); c += 4, to += 64) std::memcpy(to, &numbers[c], 4);
  }
  return {kInt8Slack * std::sqrt(largest_residual), kInt8Slack * std::sqrt(largest_norm)};
}

// All queries with kBlocks blocks.
template <int kBlocks>
HWY_INLINE void Int8ScoreBlocks(const Int8Queries& q, const uint8_t* block, float* out,
                                int64_t stride) {
  int64_t head = 0;
  for (; head + 4 <= q.group; head += 4) {
    Int8Heads<4, kBlocks>(q, head, block, out + head * stride, stride);
  }
  out += head * stride;
  if (q.group - head == 3) Int8Heads<3, kBlocks>(q, head, block, out, stride);
  if (q.group - head == 2) Int8Heads<2, kBlocks>(q, head, block, out, stride);
  if (q.group - head == 1) Int8Heads<1, kBlocks>(q, head, block, out, stride);
}

void Int8ScoreImpl(const Int8Queries& q, const void* blocks, int64_t count, float* out,
                   int64_t stride) {
  const auto* block = static_cast<const uint8_t*>(blocks);
  const int64_t bytes = Int8BlockBytes(q.dim);
  int64_t i = 0;
  for (; q.group > 4 && i + kInt8Together <= count; i += kInt8Together) {
    Int8ScoreBlocks<kInt8Together>(q, block + i * bytes, out + i * kInt8BlockRows, stride);
  }
  for (; i < count; ++i) {
    Int8ScoreBlocks<1>(q, block + i * bytes, out + i * kInt8BlockRows, stride);
  }
}

#else

Int8Error PackInt8Impl(const float* rows, int64_t count, int64_t dim, void* block) {
  return RefPackInt8(rows, count, dim, block);
}

void Int8ScoreImpl(const Int8Queries& q, const void* blocks, int64_t count, float* out,
                   int64_t stride) {
  RefInt8Score(q, blocks, count, out, stride);
}

#endif

// values[c] = query[c] / step, rounded to the nearest number in [-most, most], halves to even ones.
void RoundQueryImpl(const float* query, int64_t dim, float step, int32_t most, int16_t* values) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<int16_t, decltype(d)> d16;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t c = 0;
  for (; c + lanes <= dim; c += lanes) {
    const auto number = hn::NearestInt(hn::Div(hn::LoadU(d, query + c), hn::Set(d, step)));
    const auto bounded = hn::Min(hn::Max(number, hn::Set(di, -most)), hn::Set(di, most));
    hn::StoreU(hn::DemoteTo(d16, bounded), d16, values + c);
  }
  for (; c < dim; ++c) {
    values[c] = static_cast<int16_t>(
        std::clamp(static_cast<int32_t>(std::nearbyint(query[c] / step)), -most, most));
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(PackInt8Impl);
HWY_EXPORT(Int8ScoreImpl);
HWY_EXPORT(RoundQueryImpl);

namespace {

// With it no sum of a query and a row leaves 32 bits.
float LargestQueryNumber(int64_t dim) {
  return static_cast<float>(std::min<int64_t>(INT16_MAX, INT32_MAX / (127 * dim)));
}

}  // namespace

Int8Error PackInt8(const float* rows, int64_t count, int64_t dim, void* block) {
  return HWY_DYNAMIC_DISPATCH(PackInt8Impl)(rows, count, dim, block);
}

float Int8ScoreError(const Int8Error& of_rows, float norm, int64_t dim, float scale) {
  // A query's number is off by half a step, its largest over LargestQueryNumber.
  const float query = 0.5f * std::sqrt(static_cast<float>(dim)) / LargestQueryNumber(dim);
  const float rounding = static_cast<float>(dim) * 0x1p-23f;
  return scale * norm * (of_rows.residual + of_rows.norm * (query + rounding));
}

void MakeInt8Queries(const float* q, int64_t group, int64_t dim, float scale,
                     Int8Queries& queries) {
  const int64_t padded = (dim + 3) / 4 * 4;
  queries.group = group;
  queries.dim = dim;
  queries.values.assign(static_cast<size_t>(group * padded), 0);
  queries.bytes.assign(static_cast<size_t>(group * padded * 2), 0);
  queries.high_sum.assign(static_cast<size_t>(group), 0);
  queries.scale.resize(static_cast<size_t>(group));
  const float most = LargestQueryNumber(dim);
  for (int64_t h = 0; h < group; ++h) {
    const float* query = q + h * dim;
    float largest = 0;
    for (int64_t c = 0; c < dim; ++c) largest = std::max(largest, std::abs(query[c]));
    const float step = largest / most;
    queries.scale[static_cast<size_t>(h)] = step * scale;
    if (!(step > 0)) continue;
    int16_t* const values = queries.values.data() + h * padded;
    HWY_DYNAMIC_DISPATCH(RoundQueryImpl)(query, dim, step, static_cast<int32_t>(most), values);
    for (int64_t c = 0; c < dim; ++c) {
      const int16_t value = values[c];
      uint8_t* bytes = queries.bytes.data() + 2 * (h * padded + c / 4 * 4) + c % 4;
      bytes[0] = static_cast<uint8_t>(value & 255);
      bytes[4] = static_cast<uint8_t>(value >> 8);
      queries.high_sum[static_cast<size_t>(h)] += value >> 8;
    }
  }
  if (Int8TakesTiles(group)) PackInt8Tiles(queries);
}

float Int8ScoreError(const Int8Error& of_rows, const float* q, int64_t dim, float scale) {
  constexpr int64_t kSums = 8;  // one would wait for each addition
  float sums[kSums] = {};
  for (int64_t c = 0; c < dim; ++c) sums[c % kSums] += q[c] * q[c];
  return Int8ScoreError(of_rows, std::sqrt(std::accumulate(sums, sums + kSums, 0.0f)), dim, scale);
}

void Int8Score(const Int8Queries& queries, const void* blocks, int64_t count, float* out,
               int64_t stride) {
  if (Int8TakesTiles(queries.group)) {
    return Int8ScoreByTiles(queries, blocks, count, out, stride);
  }
  HWY_DYNAMIC_DISPATCH(Int8ScoreImpl)(queries, blocks, count, out, stride);
}

}  // namespace carrel::kernels
#endif
