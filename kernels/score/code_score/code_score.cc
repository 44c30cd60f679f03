// Two blocks at a time: every table is loaded once for 128 keys. Entries are at most 31, so eight
// planes fit a byte; then the even and the odd bytes are added to 16-bit sums.
#include "kernels/score/code_score/code_score.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/score/code_score/code_score.cc"
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

// At most the 64 bytes of a row of a block.
using ByteTag = hn::CappedTag<uint8_t, 64>;
using ByteVec = hn::Vec<ByteTag>;
using WordTag = hn::Repartition<int16_t, ByteTag>;
using WordVec = hn::Vec<WordTag>;

// Blocks that share one load of a table; their sums must fit the registers beside it.
inline constexpr int kBlocks = HWY_TARGET <= HWY_AVX3 ? 2 : 1;
inline constexpr int64_t kPlanesPerByte = 8;
// Codes are asked for this far ahead: the hardware's own prefetch stops at each page. Asking for what
// lies behind the last block is harmless.
inline constexpr int64_t kPrefetchBytes = 8192;

struct Nibbles {
  ByteVec low, high;
};

struct Sums {
  WordVec even, odd;
};

HWY_INLINE void Flush(ByteTag d8, ByteVec bytes, Sums& sums) {
  const WordTag d16;
  const hn::RebindToUnsigned<WordTag> du16;
  const auto words = hn::BitCast(du16, bytes);
  sums.even = hn::Add(sums.even, hn::BitCast(d16, hn::And(words, hn::Set(du16, uint16_t{0xff}))));
  sums.odd = hn::Add(sums.odd, hn::BitCast(d16, hn::ShiftRight<8>(words)));
}

// Totals of kHeads heads from table `entries` on (head_stride apart) with the keys in one vector's
// width of each of N blocks; done(h, block, sums).
template <int kHeads, int N, class Done>
HWY_INLINE void LookUp(const uint8_t* entries, int64_t head_stride, int64_t planes,
                       const uint8_t* block, int64_t block_bytes, const Done& done) {
  const ByteTag d8;
  const WordTag d16;
  const ByteVec mask = hn::Set(d8, uint8_t{0x0f});
  Sums sums[kHeads][N];
  CARREL_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    CARREL_UNROLL
    for (int b = 0; b < N; ++b) sums[h][b] = {hn::Zero(d16), hn::Zero(d16)};
  }
  for (int64_t first = 0; first < planes; first += kPlanesPerByte) {
    const int64_t rows = std::min(kPlanesPerByte, planes - first) / 2;
    if (rows == kPlanesPerByte / 2) {
      Nibbles keys[kPlanesPerByte / 2][N];
      CARREL_UNROLL
      for (int64_t i = 0; i < kPlanesPerByte / 2; ++i) {
        CARREL_UNROLL
        for (int b = 0; b < N; ++b) {
          const uint8_t* at = block + b * block_bytes + (first / 2 + i) * kCodeBlockKeys;
          hwy::Prefetch(at + kPrefetchBytes);
          const ByteVec row = hn::LoadU(d8, at);
          const hn::RebindToUnsigned<WordTag> du16;
          keys[i][b].low = hn::And(row, mask);
          keys[i][b].high =
              hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(du16, row))), mask);
        }
      }
      CARREL_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        const uint8_t* table = entries + h * head_stride + first * 16;
        ByteVec bytes[N];
        CARREL_UNROLL
        for (int64_t i = 0; i < kPlanesPerByte / 2; ++i) {
          const ByteVec low = hn::LoadDup128(d8, table + 32 * i);
          const ByteVec high = hn::LoadDup128(d8, table + 32 * i + 16);
          CARREL_UNROLL
          for (int b = 0; b < N; ++b) {
            const ByteVec both = hn::Add(hn::TableLookupBytes(low, keys[i][b].low),
                                         hn::TableLookupBytes(high, keys[i][b].high));
            bytes[b] = i == 0 ? both : hn::Add(bytes[b], both);
          }
        }
        CARREL_UNROLL
        for (int b = 0; b < N; ++b) Flush(d8, bytes[b], sums[h][b]);
      }
      continue;
    }
    for (int64_t i = 0; i < rows; ++i) {
      CARREL_UNROLL
      for (int b = 0; b < N; ++b) {
        const hn::RebindToUnsigned<WordTag> du16;
        const ByteVec row =
            hn::LoadU(d8, block + b * block_bytes + (first / 2 + i) * kCodeBlockKeys);
        const ByteVec low_keys = hn::And(row, mask);
        const ByteVec high_keys =
            hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(du16, row))), mask);
        CARREL_UNROLL
        for (int h = 0; h < kHeads; ++h) {
          const uint8_t* table = entries + h * head_stride + (first + 2 * i) * 16;
          Flush(d8,
                hn::Add(hn::TableLookupBytes(hn::LoadDup128(d8, table), low_keys),
                        hn::TableLookupBytes(hn::LoadDup128(d8, table + 16), high_keys)),
                sums[h][b]);
        }
      }
    }
  }
  CARREL_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    CARREL_UNROLL
    for (int b = 0; b < N; ++b) done(h, b, sums[h][b]);
  }
}

HWY_INLINE WordVec Scaled(WordTag d16, WordVec total, int16_t factor, int16_t bias) {
  return hn::SaturatedAdd(hn::MulFixedPoint15(hn::ShiftLeft<3>(total), hn::Set(d16, factor)),
                          hn::Set(d16, bias));
}

// Scores of N blocks, `heads` heads at a time; `first` of them replaces what is in out.
template <int kHeads, int N>
HWY_INLINE void ScoreHeads(const CodeTables& t, int64_t head, const uint8_t* block, bool first,
                           int16_t* out) {
  const ByteTag d8;
  const WordTag d16;
  const int64_t width = static_cast<int64_t>(hn::Lanes(d8)), planes = t.bits / 4;
  for (int64_t at = 0; at < kCodeBlockKeys; at += width) {
    WordVec even[N], odd[N];
    LookUp<kHeads, N>(
        t.entries.data() + head * planes * 16, planes * 16, planes, block + at,
        CodeBlockBytes(t.bits), [&](int h, int b, const Sums& sums) HWY_ATTR {
          const WordVec e = Scaled(d16, sums.even, t.factor[head + h], t.bias[head + h]);
          const WordVec o = Scaled(d16, sums.odd, t.factor[head + h], t.bias[head + h]);
          even[b] = h == 0 ? e : hn::Max(even[b], e);
          odd[b] = h == 0 ? o : hn::Max(odd[b], o);
        });
    for (int b = 0; b < N; ++b) {
      int16_t* low = out + b * kCodeBlockKeys + at / 2;
      int16_t* high = low + kCodeBlockKeys / 2;
      if (!first) {
        even[b] = hn::Max(even[b], hn::LoadU(d16, low));
        odd[b] = hn::Max(odd[b], hn::LoadU(d16, high));
      }
      hn::StoreU(even[b], d16, low);
      hn::StoreU(odd[b], d16, high);
    }
  }
}

template <int N>
HWY_INLINE void ScoreBlocks(const CodeTables& t, const uint8_t* block, int16_t* out) {
  int64_t head = 0;
  for (; head + 4 <= t.group; head += 4) ScoreHeads<4, N>(t, head, block, head == 0, out);
  if (head + 2 <= t.group) {
    ScoreHeads<2, N>(t, head, block, head == 0, out);
    head += 2;
  }
  if (head < t.group) ScoreHeads<1, N>(t, head, block, head == 0, out);
}

void CodeScoreImpl(const CodeTables& t, const void* blocks, int64_t count, int16_t* out) {
  const auto* block = static_cast<const uint8_t*>(blocks);
  const int64_t bytes = CodeBlockBytes(t.bits);
  int64_t i = 0;
  for (; i + kBlocks <= count; i += kBlocks) {
    ScoreBlocks<kBlocks>(t, block + i * bytes, out + i * kCodeBlockKeys);
  }
  for (; i < count; ++i) ScoreBlocks<1>(t, block + i * bytes, out + i * kCodeBlockKeys);
}

void CodeTotalsImpl(const CodeTables& t, const void* blocks, int64_t count, int16_t* totals,
                    int64_t stride) {
  const ByteTag d8;
  const WordTag d16;
  const auto* block = static_cast<const uint8_t*>(blocks);
  const int64_t width = static_cast<int64_t>(hn::Lanes(d8)), planes = t.bits / 4;
  for (int64_t h = 0; h < t.group; ++h) {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t at = 0; at < kCodeBlockKeys; at += width) {
        LookUp<1, 1>(t.entries.data() + h * planes * 16, 0, planes,
                     block + i * CodeBlockBytes(t.bits) + at, 0,
                     [&](int, int, const Sums& sums) HWY_ATTR {
                       int16_t* low = totals + h * stride + i * kCodeBlockKeys + at / 2;
                       hn::StoreU(sums.even, d16, low);
                       hn::StoreU(sums.odd, d16, low + kCodeBlockKeys / 2);
                     });
      }
    }
  }
}

int64_t AppendAboveImpl(const int16_t* scores, int64_t begin, int64_t n, int16_t bar, uint32_t* out,
                        int64_t places, int64_t* written) {
  const WordTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const WordVec bars = hn::Set(d, bar);
  int64_t i = begin, count = 0;
  const auto append = [&](int64_t at, auto mask) HWY_ATTR {
    uint8_t bytes[8] = {};
    hn::StoreMaskBits(d, mask, bytes);
    uint64_t bits;
    std::memcpy(&bits, bytes, sizeof(bits));
    // Up to four are written without a branch for each: how many there are is not foreseen.
    for (; bits != 0;) {
      const int some = std::popcount(bits);
      for (int k = 0; k < 4; ++k) {
        out[count + k] = static_cast<uint32_t>(at + std::countr_zero(bits));
        bits &= bits - 1;
      }
      count += std::min(some, 4);
    }
  };
  for (; i + 2 * lanes <= n && count + 64 <= places; i += 2 * lanes) {
    const auto m0 = hn::Gt(hn::LoadU(d, scores + i), bars);
    const auto m1 = hn::Gt(hn::LoadU(d, scores + i + lanes), bars);
    if (hn::AllFalse(d, hn::Or(m0, m1))) continue;
    append(i, m0);
    append(i + lanes, m1);
  }
  if (i + 2 * lanes > n) {
    for (; i < n && count < places; ++i) {
      if (scores[i] > bar) out[count++] = static_cast<uint32_t>(i);
    }
  }
  *written = count;
  return i;
}

#else

void CodeScoreImpl(const CodeTables& t, const void* blocks, int64_t count, int16_t* out) {
  RefCodeScore(t, blocks, count, out);
}
void CodeTotalsImpl(const CodeTables& t, const void* blocks, int64_t count, int16_t* totals,
                    int64_t stride) {
  RefCodeTotals(t, blocks, count, totals, stride);
}
int64_t AppendAboveImpl(const int16_t* scores, int64_t begin, int64_t n, int16_t bar, uint32_t* out,
                        int64_t places, int64_t* written) {
  return RefAppendAbove(scores, begin, n, bar, out, places, written);
}

#endif

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(CodeScoreImpl);
HWY_EXPORT(CodeTotalsImpl);
HWY_EXPORT(AppendAboveImpl);

namespace {
// Entries of one table: eight of them add up within a byte.
constexpr float kMaxEntry = 31;
// Scores are kept to 1/8 of a table's step.
constexpr float kFraction = 8;
// The best possible score comes out near this.
constexpr float kTop = 30000;
}  // namespace

void MakeCodeTables(const float* u, int64_t group, int64_t bits, CodeTables& t) {
  const int64_t planes = bits / 4;
  const auto heads = static_cast<size_t>(group);
  t.group = group;
  t.bits = bits;
  t.entries.resize(heads * static_cast<size_t>(planes) * 16);
  t.step.resize(heads);
  t.sum.resize(heads);
  for (int64_t h = 0; h < group; ++h) {
    const float* of_head = u + h * bits;
    float range = 0, sum = 0;
    for (int64_t p = 0; p < planes; ++p) {
      float plane = 0;
      for (int64_t b = 0; b < 4; ++b) plane += std::abs(of_head[4 * p + b]);
      range = std::max(range, 2 * plane);
      sum += plane;
    }
    const float inverse = range > 0 ? kMaxEntry / range : 0;
    for (int64_t p = 0; p < planes; ++p) {
      const float* bit = of_head + 4 * p;
      float value[16];  // of 4 bits, -1 or +1 each, above their least
      value[0] = 0;
      for (int64_t b = 0; b < 4; ++b) value[0] += std::max(0.0f, -2 * bit[b]);
      for (int b = 0; b < 4; ++b) {
        for (int n = 0; n < 1 << b; ++n) value[n | 1 << b] = value[n] + 2 * bit[b];
      }
      uint8_t* table = &t.entries[static_cast<size_t>((h * planes + p) * 16)];
      for (int n = 0; n < 16; ++n) {
        table[n] = static_cast<uint8_t>(std::clamp(value[n] * inverse + 0.5f, 0.0f, kMaxEntry));
      }
    }
    t.step[static_cast<size_t>(h)] = range / kMaxEntry;
    t.sum[static_cast<size_t>(h)] = sum;
  }
  const std::vector<float> none(heads, 0.0f);
  SetCodeOffsets(none.data(), t);
}

void SetCodeOffsets(const float* offset, CodeTables& t) {
  const auto heads = static_cast<size_t>(t.group);
  t.minimum.resize(heads);
  t.factor.resize(heads);
  t.bias.resize(heads);
  float largest_step = 0, top = -INFINITY;
  for (size_t h = 0; h < heads; ++h) {
    t.minimum[h] = offset[h] - t.sum[h];
    largest_step = std::max(largest_step, t.step[h]);
    top = std::max(top, offset[h] + t.sum[h]);
  }
  t.unit = largest_step > 0 ? largest_step / kFraction : 1;
  t.zero = top - kTop * t.unit;
  for (size_t h = 0; h < heads; ++h) {
    const float share = largest_step > 0 ? t.step[h] / largest_step : 0;
    t.factor[h] = static_cast<int16_t>(std::lround(32767 * share));
    t.bias[h] =
        static_cast<int16_t>(std::clamp((t.minimum[h] - t.zero) / t.unit, -32768.0f, 32767.0f));
  }
}

void CodeScore(const CodeTables& tables, const void* blocks, int64_t count, int16_t* out) {
  HWY_DYNAMIC_DISPATCH(CodeScoreImpl)(tables, blocks, count, out);
}

void CodeTotals(const CodeTables& tables, const void* blocks, int64_t count, int16_t* totals,
                int64_t stride) {
  HWY_DYNAMIC_DISPATCH(CodeTotalsImpl)(tables, blocks, count, totals, stride);
}

int64_t AppendAbove(const int16_t* scores, int64_t begin, int64_t n, int16_t bar, uint32_t* out,
                    int64_t places, int64_t* written) {
  return HWY_DYNAMIC_DISPATCH(AppendAboveImpl)(scores, begin, n, bar, out, places, written);
}

void PackCodes(const float* y, int64_t keys, int64_t bits, void* block) {
  auto* bytes = static_cast<uint8_t*>(block);
  std::memset(bytes, 0, static_cast<size_t>(CodeBlockBytes(bits)));
  for (int64_t r = 0; r < keys; ++r) {
    const int64_t column = r < 32 ? 2 * r : 2 * (r - 32) + 1;
    const float* of_key = y + r * bits;
    for (int64_t i = 0; i < bits / 8; ++i) {
      unsigned byte = 0;
      for (int b = 0; b < 8; ++b) byte |= static_cast<unsigned>(of_key[8 * i + b] > 0) << b;
      bytes[i * kCodeBlockKeys + column] = static_cast<uint8_t>(byte);
    }
  }
}

}  // namespace carrel::kernels
#endif
