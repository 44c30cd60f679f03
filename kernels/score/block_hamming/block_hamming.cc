// Bytes add up over as many rows of a block as cannot overflow, then the even and the odd ones are
// added to 16-bit sums. Two blocks share each table.
#include "kernels/score/block_hamming/block_hamming.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/score/block_hamming/block_hamming.cc"
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
using HammingByteTag = hn::CappedTag<uint8_t, 64>;
using HammingWordTag = hn::Repartition<uint16_t, HammingByteTag>;

// As code_score's: the hardware's own prefetch stops at each page.
inline constexpr int64_t kHammingPrefetchBytes = 8192;

// kBlocks blocks, kRows rows of each between two flushes (as many as fit a byte; kRows divides
// the block's rows or the rest is done row by row).
template <int kBlocks, int kRows>
HWY_INLINE void HammingBlocks(const HammingTables& t, const uint8_t* block, int16_t* out) {
  const HammingByteTag d8;
  const HammingWordTag d16;
  const hn::RebindToSigned<HammingWordTag> di16;
  using Bytes = hn::Vec<HammingByteTag>;
  using Words = hn::Vec<HammingWordTag>;
  const Bytes mask = hn::Set(d8, uint8_t{0x0f});
  const Words low_byte = hn::Set(d16, uint16_t{0xff});
  const int64_t width = static_cast<int64_t>(hn::Lanes(d8)), rows = t.bits / 8;
  const int64_t block_bytes = CodeBlockBytes(t.bits);
  for (int64_t at = 0; at < kCodeBlockKeys; at += width) {
    Words even[kBlocks], odd[kBlocks];
    CARREL_UNROLL
    for (int b = 0; b < kBlocks; ++b) even[b] = odd[b] = hn::Zero(d16);
    for (int64_t row = 0; row < rows;) {
      const int64_t end = std::min<int64_t>(row + kRows, rows);
      Bytes bytes[kBlocks];
      CARREL_UNROLL
      for (int b = 0; b < kBlocks; ++b) bytes[b] = hn::Zero(d8);
      for (; row < end; ++row) {
        const Bytes low = hn::LoadDup128(d8, t.entries.data() + 32 * row);
        const Bytes high = hn::LoadDup128(d8, t.entries.data() + 32 * row + 16);
        CARREL_UNROLL
        for (int b = 0; b < kBlocks; ++b) {
          const uint8_t* from = block + b * block_bytes + row * kCodeBlockKeys + at;
          hwy::Prefetch(from + kHammingPrefetchBytes);
          const Bytes codes = hn::LoadU(d8, from);
          const Bytes high_codes =
              hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(d16, codes))), mask);
          bytes[b] = hn::Add(bytes[b], hn::Add(hn::TableLookupBytes(low, hn::And(codes, mask)),
                                               hn::TableLookupBytes(high, high_codes)));
        }
      }
      CARREL_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        const Words words = hn::BitCast(d16, bytes[b]);
        even[b] = hn::Add(even[b], hn::And(words, low_byte));
        odd[b] = hn::Add(odd[b], hn::ShiftRight<8>(words));
      }
    }
    CARREL_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      int16_t* low = out + b * kCodeBlockKeys + at / 2;
      hn::StoreU(hn::BitCast(di16, even[b]), di16, low);
      hn::StoreU(hn::BitCast(di16, odd[b]), di16, low + kCodeBlockKeys / 2);
    }
  }
}

template <int kRows>
HWY_INLINE void HammingAll(const HammingTables& t, const uint8_t* block, int64_t count,
                           int16_t* out) {
  const int64_t bytes = CodeBlockBytes(t.bits);
  int64_t i = 0;
  for (; i + 2 <= count; i += 2) {
    HammingBlocks<2, kRows>(t, block + i * bytes, out + i * kCodeBlockKeys);
  }
  if (i < count) HammingBlocks<1, kRows>(t, block + i * bytes, out + i * kCodeBlockKeys);
}

void BlockHammingScoreImpl(const HammingTables& t, const void* blocks, int64_t count,
                           int16_t* out) {
  const auto* block = static_cast<const uint8_t*>(blocks);
  // A row gains at most 8 group.
  if (4 * 8 * t.group <= 255) {
    HammingAll<4>(t, block, count, out);
  } else if (2 * 8 * t.group <= 255) {
    HammingAll<2>(t, block, count, out);
  } else {
    HammingAll<1>(t, block, count, out);
  }
}

#else

void BlockHammingScoreImpl(const HammingTables& t, const void* blocks, int64_t count,
                           int16_t* out) {
  RefBlockHammingScore(t, blocks, count, out);
}

#endif

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(BlockHammingScoreImpl);

void MakeHammingTables(const float* y, int64_t group, int64_t bits, HammingTables& t) {
  t.group = group;
  t.bits = bits;
  t.entries.resize(static_cast<size_t>(bits / 4 * 16));
  for (int64_t plane = 0; plane < bits / 4; ++plane) {
    int64_t set[4] = {};
    for (int64_t h = 0; h < group; ++h) {
      for (int64_t b = 0; b < 4; ++b) set[b] += y[h * bits + 4 * plane + b] > 0;
    }
    for (int64_t nibble = 0; nibble < 16; ++nibble) {
      int64_t gained = 0;
      for (int64_t b = 0; b < 4; ++b) gained += nibble >> b & 1 ? set[b] : group - set[b];
      t.entries[static_cast<size_t>(plane * 16 + nibble)] = static_cast<uint8_t>(gained);
    }
  }
}

void BlockHammingScore(const HammingTables& tables, const void* blocks, int64_t count,
                       int16_t* out) {
  HWY_DYNAMIC_DISPATCH(BlockHammingScoreImpl)(tables, blocks, count, out);
}

}  // namespace carrel::kernels
#endif
