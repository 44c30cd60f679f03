// Rows are the left operand, as they lie; 16 queries are the right one. Four tiles of sums at a time,
// since one product waits long for the one before it. A score then lies beside those of its row, and
// four queries' scores of 16 rows change places in registers.
#include "kernels/score/dot_score/dot_score_amx.h"

#include "common/status.h"
#include "kernels/amx.h"

#if defined(__x86_64__)

#include <vector>

#include "kernels/amx_tiles-inl.h"

namespace carrel::kernels {
namespace {

using amx::kTileColumns;
using amx::kTileElements;
using amx::kTileFloats;
using amx::kTileRows;

constexpr int kParts = 3;
constexpr int64_t kTiles = 4;  // of rows that are multiplied at a time
constexpr int64_t kBlockRows = kTiles * kTileRows;
// Queries whose tiles stay in the caches beside the rows.
constexpr int64_t kPassQueries = 128;

struct Rows {
  const uint8_t* first;
  const void* const* at;
  int64_t bytes;  // of a row
  int64_t count;

  CARREL_AMX_INLINE const uint8_t* Row(int64_t j) const {
    return at == nullptr ? first + j * bytes : static_cast<const uint8_t*>(at[j]);
  }
  // Asks for rows [begin, end), as far as they are there.
  CARREL_AMX_INLINE void AskFor(int64_t begin, int64_t end) const {
    for (int64_t j = begin; j < std::min(end, count); ++j) {
      const uint8_t* const row = Row(j);
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b, 0, 2);
      if (at != nullptr) __builtin_prefetch(row + bytes - 1, 0, 2);  // a line more, not aligned
    }
  }
  // Rows [begin, begin + kBlockRows) one after the other in `room`, the last one again for those that
  // are not there: tiles are loaded for each part, and slowly from anywhere but the L1 cache.
  CARREL_AMX_INLINE const uint8_t* Block(int64_t begin, uint8_t* room) const {
    for (int64_t j = 0; j < kBlockRows; ++j) {
      const uint8_t* const row = Row(std::min(begin + j, count - 1));
      for (int64_t b = 0; b < bytes; b += 64) {
        _mm512_store_si512(room + j * bytes + b, _mm512_loadu_si512(row + b));
      }
    }
    amx::Written();
    return room;
  }
};

// sums[t][row][query]: 16 queries with the rows of a block that begins at row j. The rows after it are
// asked for meanwhile, a few at a time: at once, they would hold up those that are needed first.
template <bool kAsk>
CARREL_AMX_INLINE void MultiplyBlock(const uint8_t* block, const Rows& rows, int64_t j,
                                     const uint16_t* queries, int64_t steps, float* sums) {
  const int64_t bytes = rows.bytes, at_a_time = amx::CeilDivide(kBlockRows, kParts * steps);
  int64_t ask = j + kBlockRows;
  const int64_t next = kTileRows * bytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t part = kParts - 1; part >= 0; --part) {
    for (int64_t s = 0; s < steps; ++s) {
      const uint8_t* const columns = block + s * amx::kTileStride;
      if (kAsk) rows.AskFor(ask, ask + at_a_time);
      ask += at_a_time;
      _tile_loadd(4, queries + (s * kParts + part) * kTileElements, amx::kTileStride);
      _tile_loadd(5, columns, bytes);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(6, columns + next, bytes);
      _tile_dpbf16ps(1, 6, 4);
      _tile_loadd(7, columns + 2 * next, bytes);
      _tile_dpbf16ps(2, 7, 4);
      _tile_loadd(5, columns + 3 * next, bytes);
      _tile_dpbf16ps(3, 5, 4);
    }
  }
  _tile_stored(0, sums, amx::kTileStride);
  _tile_stored(1, sums + kTileFloats, amx::kTileStride);
  _tile_stored(2, sums + 2 * kTileFloats, amx::kTileStride);
  _tile_stored(3, sums + 3 * kTileFloats, amx::kTileStride);
}

// Four numbers of rows i, i + 4, i + 8 and i + 12 of a tile of sums.
CARREL_AMX_INLINE __m512 FourOfRows(const float* sums, int64_t i) {
  const auto four = [&](int64_t row) CARREL_AMX { return _mm_load_ps(sums + (i + row) * 16); };
  __m512 all = _mm512_castps128_ps512(four(0));
  all = _mm512_insertf32x4(all, four(4), 1);
  all = _mm512_insertf32x4(all, four(8), 2);
  return _mm512_insertf32x4(all, four(12), 3);
}

// The scores of queries [h, h + 4), of which `count` are there, with 16 rows.
CARREL_AMX_INLINE void StoreFour(const float* sums, int64_t h, int64_t count, __m512 scale,
                                 __mmask16 real, float* scores, int64_t stride) {
  const __m512 a = FourOfRows(sums + h, 0), b = FourOfRows(sums + h, 1);
  const __m512 c = FourOfRows(sums + h, 2), d = FourOfRows(sums + h, 3);
  const __m512d ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
  const __m512d ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
  const __m512d cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
  const __m512d cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
  const auto store = [&](int64_t i, __m512d of_query) CARREL_AMX {
    if (i >= count) return;
    _mm512_mask_storeu_ps(scores + (h + i) * stride, real,
                          _mm512_mul_ps(scale, _mm512_castpd_ps(of_query)));
  };
  store(0, _mm512_unpacklo_pd(ab_low, cd_low));
  store(1, _mm512_unpackhi_pd(ab_low, cd_low));
  store(2, _mm512_unpacklo_pd(ab_high, cd_high));
  store(3, _mm512_unpackhi_pd(ab_high, cd_high));
}

// What waits to be written holds up the stores behind it, on which tiles wait.
CARREL_AMX_INLINE void AskToWrite(float* scores, int64_t queries, int64_t stride) {
  for (int64_t h = 0; h < queries; ++h) {
    for (int64_t i = 0; i < kBlockRows; i += 16) __builtin_prefetch(scores + h * stride + i, 1);
  }
}

// `queries` queries, packed 16 by 16, with all rows.
CARREL_AMX void ScorePass(const uint16_t* packed, int64_t queries, const Rows& rows, int64_t steps,
                          uint8_t* room, float scale, float* scores, int64_t stride) {
  alignas(64) float sums[kTiles * kTileFloats];
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t j = 0; j < rows.count; j += kBlockRows) {
    const uint8_t* const block = rows.Block(j, room);
    for (int64_t h = 0; h < queries; h += kTileRows) {
      const uint16_t* const run = packed + h / kTileRows * kParts * steps * kTileElements;
      if (h == 0) {
        MultiplyBlock<true>(block, rows, j, run, steps, sums);
      } else {
        MultiplyBlock<false>(block, rows, j, run, steps, sums);
      }
      const int64_t here = std::min(kTileRows, queries - h);
      AskToWrite(scores + h * stride + j + kBlockRows, here, stride);
      for (int64_t t = 0; t < kTiles && j + t * kTileRows < rows.count; ++t) {
        const int64_t first = j + t * kTileRows;
        const auto real =
            static_cast<__mmask16>((1u << std::min(kTileRows, rows.count - first)) - 1);
        for (int64_t i = 0; i < here; i += 4) {
          StoreFour(sums + t * kTileFloats, i, here - i, factor, real, scores + h * stride + first,
                    stride);
        }
      }
    }
  }
}

}  // namespace

bool TakesTiles(int64_t head_dim) { return head_dim % kTileColumns == 0 && AmxUsed(); }

CARREL_AMX void DotScoreInParts(const float* q, int64_t group, int64_t head_dim, const void* k,
                                const void* const* row_at, int64_t rows, float scale, float* scores,
                                int64_t score_stride) {
  if (rows == 0) return;
  const int64_t steps = head_dim / kTileColumns, run = kParts * steps * kTileElements;
  const int64_t runs = amx::CeilDivide(std::min(kPassQueries, group), kTileRows);
  const Rows keys{static_cast<const uint8_t*>(k), row_at, 2 * head_dim, rows};
  thread_local std::vector<uint16_t> memory;
  memory.resize(static_cast<size_t>(runs * run + kBlockRows * head_dim + kTileColumns));
  auto* const packed =
      reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  auto* const room = reinterpret_cast<uint8_t*>(packed + runs * run);
  const amx::TileScope scope;
  for (int64_t h = 0; h < group; h += kPassQueries) {
    const int64_t queries = std::min(kPassQueries, group - h);
    for (int64_t i = 0; i < queries; i += kTileRows) {
      amx::PackPairs<kParts>(q + (h + i) * head_dim, std::min(kTileRows, queries - i), head_dim,
                             head_dim, 1.0f, packed + i / kTileRows * run);
    }
    amx::Written();
    ScorePass(packed, queries, keys, steps, room, scale, scores + h * score_stride, score_stride);
  }
}

}  // namespace carrel::kernels

#else

namespace carrel::kernels {

bool TakesTiles(int64_t) { return false; }

void DotScoreInParts(const float*, int64_t, int64_t, const void*, const void* const*, int64_t,
                     float, float*, int64_t) {
  CARREL_CHECK(false);  // TakesTiles() is false here
}

}  // namespace carrel::kernels
#endif
