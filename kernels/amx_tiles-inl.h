// What:   what kernels on AMX's tiles share: numbers in parts of bf16, tiles of them packed as the
//         products take them.
// Math:   x = p0 + p1 + .. + rest, each part what the earlier ones leave, rounded to nearest bf16:
//         |rest| <= 2^-8 |x| for one part (0 if x was bf16), 2^-17 for two, 2^-26 for three.
//         Two numbers in two parts: x y = p0 q0 + p1 q0 + p0 q1 up to some 2^-16 of it. Three parts
//         and a number that was bf16: up to the rounding of f32. Sums are f32.
//         Infinity becomes NaN; what is below 2^-126 counts as zero.
// Shapes: a tile is 1 KiB. Rows: [16][32] bf16, the left operand. Pairs: [16][16] pairs of bf16, pair
//         [i][r] being columns 2 i and 2 i + 1 of row r: the right operand. They are each other's
//         transpose, as numbers of 32 bits. A run is the tiles of 16 rows, for every 32 columns one
//         tile per part.
// Only for files that ask AmxUsed() before they call any of this.
#pragma once

// GCC 12 warns of its own headers; Clang knows no such warning.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>

#define CARREL_AMX \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")))
#define CARREL_AMX_INLINE CARREL_AMX inline __attribute__((always_inline))
// For products of integers of 8 bits.
#define CARREL_AMX_INT8 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-int8")))
#define CARREL_AMX_INT8_INLINE CARREL_AMX_INT8 inline __attribute__((always_inline))

namespace carrel::kernels::amx {

inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileColumns = 32;  // of bf16; of f32 16
inline constexpr int64_t kTileElements = kTileRows * kTileColumns;
inline constexpr int64_t kTileFloats = kTileRows * 16;  // the same kilobyte
inline constexpr int64_t kTileStride = 64;              // bytes

inline int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline constexpr TileConfig kTileConfig;

// All eight tiles of 16 rows of 64 bytes, for as long as it lives: released, they need not be kept
// when threads take turns.
class TileScope {
 public:
  CARREL_AMX TileScope() { _tile_loadconfig(&kTileConfig); }
  CARREL_AMX ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// The compiler does not know that loads of tiles read memory.
CARREL_AMX_INLINE void Written() { asm volatile("" ::: "memory"); }

// 32 numbers in parts of 32 bf16, in order.
template <int kParts>
CARREL_AMX_INLINE void Split(__m512 first, __m512 second, __m512i (&parts)[kParts]) {
#pragma GCC unroll 3
  for (int i = 0; i < kParts; ++i) {
    const auto part = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
    parts[i] = part;
    if (i + 1 == kParts) break;
    const __m512i wide_first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(part));
    const __m512i wide_second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(part, 1));
    first = _mm512_sub_ps(first, _mm512_castsi512_ps(_mm512_slli_epi32(wide_first, 16)));
    second = _mm512_sub_ps(second, _mm512_castsi512_ps(_mm512_slli_epi32(wide_second, 16)));
  }
}

// In place.
CARREL_AMX_INLINE void TransposeTile(uint16_t* tile) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_load_si512(tile + i * kTileColumns);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  // a[4 i + c]: column c of every 128 bits, of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
    a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
  }
  // The 16 blocks of 128 bits that a column is spread over.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i low0 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
    const __m512i low1 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    const __m512i high0 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    const __m512i high1 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    _mm512_store_si512(tile + c * kTileColumns, _mm512_shuffle_i32x4(low0, low1, 0x88));
    _mm512_store_si512(tile + (8 + c) * kTileColumns, _mm512_shuffle_i32x4(low0, low1, 0xdd));
    _mm512_store_si512(tile + (4 + c) * kTileColumns, _mm512_shuffle_i32x4(high0, high1, 0x88));
    _mm512_store_si512(tile + (12 + c) * kTileColumns, _mm512_shuffle_i32x4(high0, high1, 0xdd));
  }
}

// The first `count` numbers at x, zero behind them. count may be negative.
CARREL_AMX_INLINE __m512 LoadFirst(const float* x, int64_t count) {
  if (count >= 16) return _mm512_loadu_ps(x);
  const auto mask = static_cast<__mmask16>((1u << std::max<int64_t>(0, count)) - 1);
  return _mm512_maskz_loadu_ps(mask, x);
}

// Columns [32 step, 32 step + 32) of rows [0, rows) of x, 16 at most, times `factor`, as tiles of
// rows, one per part. What is missing is zero.
template <int kParts>
CARREL_AMX_INLINE void PackStep(const float* x, int64_t rows, int64_t stride, int64_t columns,
                                int64_t step, float factor, uint16_t* tiles) {
  const __m512 factors = _mm512_set1_ps(factor);
  const int64_t left = columns - step * kTileColumns;
  const float* at = x + step * kTileColumns;
  for (int64_t r = 0; r < kTileRows; ++r) {
    __m512i parts[kParts] = {};
    if (r < rows) {
      const __m512 first = LoadFirst(at, left);
      const __m512 second = left > 16 ? LoadFirst(at + 16, left - 16) : _mm512_setzero_ps();
      Split(_mm512_mul_ps(first, factors), _mm512_mul_ps(second, factors), parts);
      at += stride;
    }
#pragma GCC unroll 3
    for (int i = 0; i < kParts; ++i) {
      _mm512_store_si512(tiles + i * kTileElements + r * kTileColumns, parts[i]);
    }
  }
}

// All columns: a run of tiles of rows.
template <int kParts>
CARREL_AMX_INLINE void PackRows(const float* x, int64_t rows, int64_t stride, int64_t columns,
                                float factor, uint16_t* run) {
  for (int64_t s = 0; s < CeilDivide(columns, kTileColumns); ++s, run += kParts * kTileElements) {
    PackStep<kParts>(x, rows, stride, columns, s, factor, run);
  }
}

// A run of tiles of pairs.
template <int kParts>
CARREL_AMX_INLINE void PackPairs(const float* x, int64_t rows, int64_t stride, int64_t columns,
                                 float factor, uint16_t* run) {
  for (int64_t s = 0; s < CeilDivide(columns, kTileColumns); ++s, run += kParts * kTileElements) {
    PackStep<kParts>(x, rows, stride, columns, s, factor, run);
    for (int i = 0; i < kParts; ++i) TransposeTile(run + i * kTileElements);
  }
}

CARREL_AMX_INLINE void MultiplyTiles() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(3, 5, 7);
}

// Four tiles of sums, 0 and 1 above 2 and 3, of the products of two runs of rows (`top`, `bottom`) with
// two of pairs (`left`, `right`) over `steps` times 32 columns, all in two parts.
CARREL_AMX_INLINE void AddProducts(const uint16_t* top, const uint16_t* bottom,
                                   const uint16_t* left, const uint16_t* right, int64_t steps) {
  for (int64_t s = 0; s < steps; ++s) {
    const int64_t at = 2 * s * kTileElements, low = at + kTileElements;
    _tile_loadd(4, top + at, kTileStride);
    _tile_loadd(6, left + at, kTileStride);
    _tile_loadd(5, bottom + at, kTileStride);
    _tile_loadd(7, right + at, kTileStride);
    MultiplyTiles();
    _tile_loadd(4, top + low, kTileStride);
    _tile_loadd(5, bottom + low, kTileStride);
    MultiplyTiles();
    _tile_loadd(6, left + low, kTileStride);
    _tile_loadd(4, top + at, kTileStride);
    _tile_loadd(5, bottom + at, kTileStride);
    _tile_loadd(7, right + low, kTileStride);
    MultiplyTiles();
  }
}

// The same with rows in three parts and pairs in one.
CARREL_AMX_INLINE void AddProducts3By1(const uint16_t* top, const uint16_t* bottom,
                                       const uint16_t* left, const uint16_t* right, int64_t steps) {
  for (int64_t s = 0; s < steps; ++s) {
    const int64_t at = 3 * s * kTileElements;
    _tile_loadd(6, left + s * kTileElements, kTileStride);
    _tile_loadd(7, right + s * kTileElements, kTileStride);
    for (int64_t part = at; part < at + 3 * kTileElements; part += kTileElements) {
      _tile_loadd(4, top + part, kTileStride);
      _tile_loadd(5, bottom + part, kTileStride);
      MultiplyTiles();
    }
  }
}

}  // namespace carrel::kernels::amx
