// What:   quantised blocks to float, in vectors: the values of kernels/layer/dequantize, bit for bit.
// Math:   a value is d * q + m with q a byte, in order, and d and m for each 16 of them. A scale times
//         q needs no rounding in fp32, so that the one of the sum is all there is.
// Cost:   some 0.1 ns per value.
#if defined(CARREL_KERNELS_WIDEN_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_WIDEN_BLOCKS_INL_H_
#undef CARREL_KERNELS_WIDEN_BLOCKS_INL_H_
#else
#define CARREL_KERNELS_WIDEN_BLOCKS_INL_H_
#endif

#include <cstring>

#include "kernels/layer/dequantize/dequantize.h"
#include "kernels/layer/dequantize/steps.h"
#include "kernels/layer/quantized_linear/block_tiles-inl.h"

#if CARREL_BLOCK_PRODUCTS

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

using Bytes32Tag = hn::FixedTag<uint8_t, 32>;
using Bytes32 = hn::Vec<Bytes32Tag>;

HWY_INLINE Bytes32 Load32(const uint8_t* at) { return hn::LoadU(Bytes32Tag(), at); }

// (bytes >> kBits) & mask
template <int kBits>
HWY_INLINE Bytes32 Field(Bytes32 bytes, uint8_t mask) {
  const hn::Repartition<uint16_t, Bytes32Tag> d;
  return hn::And(hn::BitCast(Bytes32Tag(), hn::ShiftRight<kBits>(hn::BitCast(d, bytes))),
                 hn::Set(Bytes32Tag(), mask));
}

// (bytes & mask) << kBits
template <int kBits>
HWY_INLINE Bytes32 Raised(Bytes32 bytes, uint8_t mask) {
  const hn::Repartition<uint16_t, Bytes32Tag> d;
  const Bytes32 field = hn::And(bytes, hn::Set(Bytes32Tag(), mask));
  return hn::BitCast(Bytes32Tag(), hn::ShiftLeft<kBits>(hn::BitCast(d, field)));
}

// The low nibbles of 16 bytes, then the high ones.
HWY_INLINE Bytes32 Nibbles(const uint8_t* at) {
  const hn::FixedTag<uint8_t, 16> d;
  const hn::Repartition<uint16_t, decltype(d)> d16;
  const auto bytes = hn::LoadU(d, at);
  const auto high = hn::BitCast(d, hn::ShiftRight<4>(hn::BitCast(d16, bytes)));
  return Field<0>(hn::Combine(Bytes32Tag(), high, bytes), 15);
}

// 16 where a bit of 32 is set.
HWY_INLINE Bytes32 FifthBits(const uint8_t* at) {
  const Bytes32Tag d;
  alignas(32) static constexpr uint8_t kByteOfBit[32] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1,
                                                         1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2,
                                                         2, 2, 3, 3, 3, 3, 3, 3, 3, 3};
  uint32_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  const Bytes32 all = hn::BitCast(d, hn::Set(hn::Repartition<uint32_t, Bytes32Tag>(), bits));
  const Bytes32 bit =
      hn::BitCast(d, hn::Set(hn::Repartition<uint64_t, Bytes32Tag>(), 0x8040201008040201ull));
  const Bytes32 here = hn::TableLookupBytes(all, hn::Load(d, kByteOfBit));
  return hn::IfThenElseZero(hn::TestBit(here, bit), hn::Set(d, uint8_t{16}));
}

HWY_INLINE Bytes32 LookUp(const int8_t* table, Bytes32 indices) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(table);
  return hn::TableLookupBytes(hn::LoadDup128(Bytes32Tag(), bytes), indices);
}

HWY_INLINE float HalfAt(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  const hn::FixedTag<hwy::float16_t, 4> d16;
  const auto half = hn::BitCast(d16, hn::Set(hn::FixedTag<uint16_t, 4>(), bits));
  return hn::GetLane(hn::PromoteTo(hn::FixedTag<float, 4>(), half));
}

// A group of 32, T int8_t or uint8_t: d[0], m[0] for its first 16 values, d[1], m[1] for the others.
template <class T>
HWY_INLINE void WidenGroup(Bytes32 q, const float (&d)[2], const float (&m)[2], float* out) {
  const FloatTag df;
  const hn::RebindToSigned<FloatTag> d32;
  const hn::Rebind<T, FloatTag> d8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  alignas(32) uint8_t bytes[32];
  hn::Store(q, Bytes32Tag(), bytes);
  CARREL_UNROLL
  for (int64_t i = 0; i < 32; i += lanes) {
    const auto numbers = hn::LoadU(d8, reinterpret_cast<const T*>(bytes) + i);
    const FloatVec value = hn::ConvertTo(df, hn::PromoteTo(d32, numbers));
    hn::StoreU(hn::MulAdd(hn::Set(df, d[i / 16]), value, hn::Set(df, m[i / 16])), df, out + i);
  }
}

template <class T>
HWY_INLINE void WidenGroup(Bytes32 q, float d, float m, float* out) {
  WidenGroup<T>(q, {d, d}, {m, m}, out);
}

HWY_INLINE void WidenQ4_0(const uint8_t* b, float* out) {
  const float d = HalfAt(b);
  WidenGroup<uint8_t>(Nibbles(b + 2), d, -8 * d, out);
}

HWY_INLINE void WidenQ4_1(const uint8_t* b, float* out) {
  WidenGroup<uint8_t>(Nibbles(b + 4), HalfAt(b), HalfAt(b + 2), out);
}

HWY_INLINE void WidenQ5_0(const uint8_t* b, float* out) {
  const float d = HalfAt(b);
  WidenGroup<uint8_t>(hn::Or(Nibbles(b + 6), FifthBits(b + 2)), d, -16 * d, out);
}

HWY_INLINE void WidenQ5_1(const uint8_t* b, float* out) {
  WidenGroup<uint8_t>(hn::Or(Nibbles(b + 8), FifthBits(b + 4)), HalfAt(b), HalfAt(b + 2), out);
}

HWY_INLINE void WidenQ8_0(const uint8_t* b, float* out) {
  WidenGroup<int8_t>(Load32(b + 2), HalfAt(b), 0, out);
}

HWY_INLINE void WidenQ2K(const uint8_t* b, float* out) {
  const float d = HalfAt(b + 80), m = HalfAt(b + 82);
  const auto group = [&](int64_t g, Bytes32 q) HWY_ATTR {
    const uint8_t* s = b + 2 * g;
    WidenGroup<uint8_t>(q, {d * static_cast<float>(s[0] & 15), d * static_cast<float>(s[1] & 15)},
                        {-m * static_cast<float>(s[0] >> 4), -m * static_cast<float>(s[1] >> 4)},
                        out + 32 * g);
  };
  for (int64_t half = 0; half < 2; ++half) {
    const Bytes32 bits = Load32(b + 16 + 32 * half);
    group(4 * half, Field<0>(bits, 3));
    group(4 * half + 1, Field<2>(bits, 3));
    group(4 * half + 2, Field<4>(bits, 3));
    group(4 * half + 3, Field<6>(bits, 3));
  }
}

// The third bit counts from -4.
HWY_INLINE void WidenQ3K(const uint8_t* b, float* out) {
  const uint8_t* scales = b + 96;
  const float d = HalfAt(b + 108);
  Bytes32 third = Load32(b);
  const auto step = [&](int64_t s) {
    const int low = s < 8 ? scales[s] & 15 : scales[s - 8] >> 4;
    const int high = scales[8 + s % 4] >> (s / 4 * 2) & 3;
    return d * static_cast<float>((low | high << 4) - 32);
  };
  const auto group = [&](int64_t g, Bytes32 q) HWY_ATTR {
    const float first = step(2 * g), last = step(2 * g + 1);
    WidenGroup<uint8_t>(hn::Or(q, Raised<2>(third, 1)), {first, last}, {-4 * first, -4 * last},
                        out + 32 * g);
    third = Field<1>(third, 127);
  };
  for (int64_t half = 0; half < 2; ++half) {
    const Bytes32 bits = Load32(b + 32 + 32 * half);
    group(4 * half, Field<0>(bits, 3));
    group(4 * half + 1, Field<2>(bits, 3));
    group(4 * half + 2, Field<4>(bits, 3));
    group(4 * half + 3, Field<6>(bits, 3));
  }
}

// Scale and minimum of group g, of 6 bits each in 12 bytes (Q4_K, Q5_K).
HWY_INLINE int SixBitScale(const uint8_t* at, int64_t g) {
  return g < 4 ? at[g] & 63 : (at[g + 4] & 15) | (at[g - 4] >> 6) << 4;
}
HWY_INLINE int SixBitMinimum(const uint8_t* at, int64_t g) {
  return g < 4 ? at[g + 4] & 63 : at[g + 4] >> 4 | (at[g] >> 6) << 4;
}

HWY_INLINE void WidenQ4K(const uint8_t* b, float* out) {
  const float d = HalfAt(b), m = HalfAt(b + 2);
  const auto group = [&](int64_t g, Bytes32 q) HWY_ATTR {
    WidenGroup<uint8_t>(q, d * static_cast<float>(SixBitScale(b + 4, g)),
                        -m * static_cast<float>(SixBitMinimum(b + 4, g)), out + 32 * g);
  };
  for (int64_t g = 0; g < kChunkGroups; g += 2) {
    const Bytes32 bytes = Load32(b + 16 + 16 * g);
    group(g, Field<0>(bytes, 15));
    group(g + 1, Field<4>(bytes, 15));
  }
}

HWY_INLINE void WidenQ5K(const uint8_t* b, float* out) {
  const float d = HalfAt(b), m = HalfAt(b + 2);
  Bytes32 fifth = Load32(b + 16);
  const auto group = [&](int64_t g, Bytes32 q) HWY_ATTR {
    WidenGroup<uint8_t>(hn::Or(q, Raised<4>(fifth, 1)),
                        d * static_cast<float>(SixBitScale(b + 4, g)),
                        -m * static_cast<float>(SixBitMinimum(b + 4, g)), out + 32 * g);
    fifth = Field<1>(fifth, 127);
  };
  for (int64_t g = 0; g < kChunkGroups; g += 2) {
    const Bytes32 bytes = Load32(b + 48 + 16 * g);
    group(g, Field<0>(bytes, 15));
    group(g + 1, Field<4>(bytes, 15));
  }
}

HWY_INLINE void WidenQ6K(const uint8_t* b, float* out) {
  const float d = HalfAt(b + 208);
  const auto group = [&](int64_t g, Bytes32 low, Bytes32 high) HWY_ATTR {
    int8_t scales[2];
    std::memcpy(scales, b + 192 + 2 * g, sizeof(scales));
    const float first = d * static_cast<float>(scales[0]), last = d * static_cast<float>(scales[1]);
    WidenGroup<uint8_t>(hn::Or(low, high), {first, last}, {-32 * first, -32 * last}, out + 32 * g);
  };
  for (int64_t half = 0; half < 2; ++half) {
    const Bytes32 a = Load32(b + 64 * half), c = Load32(b + 64 * half + 32);
    const Bytes32 high = Load32(b + 128 + 32 * half);
    group(4 * half, Field<0>(a, 15), Raised<4>(high, 3));
    group(4 * half + 1, Field<0>(c, 15), Raised<2>(high, 12));
    group(4 * half + 2, Field<4>(a, 15), Field<0>(high, 48));
    group(4 * half + 3, Field<4>(c, 15), Field<2>(high, 48));
  }
}

HWY_INLINE void WidenIq4Nl(const uint8_t* b, float* out) {
  WidenGroup<int8_t>(LookUp(kNormalSteps, Nibbles(b + 2)), HalfAt(b), 0, out);
}

HWY_INLINE void WidenIq4Xs(const uint8_t* b, float* out) {
  const float d = HalfAt(b);
  const int high = b[2] | b[3] << 8;
  for (int64_t g = 0; g < kChunkGroups; ++g) {
    const int scale = (b[4 + g / 2] >> (g % 2 * 4) & 15) | (high >> (2 * g) & 3) << 4;
    WidenGroup<int8_t>(LookUp(kNormalSteps, Nibbles(b + 8 + 16 * g)),
                       d * static_cast<float>(scale - 32), 0, out + 32 * g);
  }
}

HWY_INLINE void WidenMxfp4(const uint8_t* b, float* out) {
  WidenGroup<int8_t>(LookUp(kFloat4Steps, Nibbles(b + 1)), Mxfp4Scale(b[0]), 0, out);
}

template <void (*kWiden)(const uint8_t*, float*)>
HWY_INLINE void WidenEach(GgufType type, const uint8_t* block, int64_t count, float* out) {
  const GgufTypeTraits& traits = TraitsOf(type);
  for (int64_t i = 0; i < count; i += traits.block_elements) {
    kWiden(block, out + i);
    block += traits.block_bytes;
  }
}

template <class E>
HWY_INLINE void WidenPlain(const uint8_t* row, int64_t count, float* out) {
  const FloatTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(E::Load(d, row, i), d, out + i);
  if (i < count) StorePartial(d, E::LoadPartial(d, row, i, count - i), out + i, count - i);
}

// `count` values, whole blocks.
inline void WidenBlocks(GgufType type, const uint8_t* blocks, int64_t count, float* out) {
  switch (type) {
    case GgufType::kQ4_0:
      return WidenEach<WidenQ4_0>(type, blocks, count, out);
    case GgufType::kQ4_1:
      return WidenEach<WidenQ4_1>(type, blocks, count, out);
    case GgufType::kQ5_0:
      return WidenEach<WidenQ5_0>(type, blocks, count, out);
    case GgufType::kQ5_1:
      return WidenEach<WidenQ5_1>(type, blocks, count, out);
    case GgufType::kQ8_0:
      return WidenEach<WidenQ8_0>(type, blocks, count, out);
    case GgufType::kQ2_K:
      return WidenEach<WidenQ2K>(type, blocks, count, out);
    case GgufType::kQ3_K:
      return WidenEach<WidenQ3K>(type, blocks, count, out);
    case GgufType::kQ4_K:
      return WidenEach<WidenQ4K>(type, blocks, count, out);
    case GgufType::kQ5_K:
      return WidenEach<WidenQ5K>(type, blocks, count, out);
    case GgufType::kQ6_K:
      return WidenEach<WidenQ6K>(type, blocks, count, out);
    case GgufType::kIQ4_NL:
      return WidenEach<WidenIq4Nl>(type, blocks, count, out);
    case GgufType::kIQ4_XS:
      return WidenEach<WidenIq4Xs>(type, blocks, count, out);
    case GgufType::kMxfp4:
      return WidenEach<WidenMxfp4>(type, blocks, count, out);
    case GgufType::kF16:
      return WidenPlain<F16Element>(blocks, count, out);
    case GgufType::kBf16:
      return WidenPlain<Bf16Element>(blocks, count, out);
    case GgufType::kF32:
      return WidenPlain<F32Element>(blocks, count, out);
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_BLOCK_PRODUCTS

#endif
