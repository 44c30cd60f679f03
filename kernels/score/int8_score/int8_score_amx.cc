// Two blocks at a time, low and high bytes apart: four tiles of sums, since one product waits long for
// the one before it. A row of a tile of sums is a query's scores of a block, as they are wanted. The next
// two blocks are asked for meanwhile, some lines a query: all at once, a core waits for the first ones.
#include "kernels/score/int8_score/int8_score_amx.h"

#include "common/status.h"
#include "kernels/amx.h"

#if defined(__x86_64__)

#include <algorithm>

#include "kernels/amx_tiles-inl.h"

namespace carrel::kernels {
namespace {

using amx::kTileRows;

// Fewer queries leave most of a tile unused.
constexpr int64_t kLeastQueries = 8;
// Queries whose bytes stay in the L1 cache beside two blocks.
constexpr int64_t kPassQueries = 64;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kLineBytes = 64;  // four numbers of 16 rows

static_assert(kInt8BlockRows == 16);

// The lines of a block, in steps of equally many: the last step begins where it ends with the block,
// and what it has in common with the one before is zero in its queries.
struct Steps {
  explicit Steps(int64_t dim)
      : lines((dim + 3) / 4),
        count(amx::CeilDivide(lines, 16)),
        step_lines(amx::CeilDivide(lines, count)) {}
  int64_t First(int64_t step) const { return std::min(step * step_lines, lines - step_lines); }

  int64_t lines, count, step_lines;
};

// Of 16 queries.
int64_t TileRunBytes(const Steps& steps) { return 2 * steps.count * kTileBytes; }

// Sums 0 to 3, queries' low and high bytes 4 and 5, rows 6 and 7.
CARREL_AMX_INT8_INLINE void Configure(const Steps& steps) {
  amx::TileConfig config;
  for (const int tile : {4, 5})
    config.row_bytes[tile] = static_cast<uint16_t>(4 * steps.step_lines);
  for (const int tile : {6, 7}) config.rows[tile] = static_cast<uint8_t>(steps.step_lines);
  asm volatile("" ::"r"(&config) : "memory");  // all of it is read: the compiler knows of 8 bytes
  _tile_loadconfig(&config);
}

// Tiles of 16 queries from `head` on: for each step the low bytes, then the high ones.
void PackQueries(const Int8Queries& q, int64_t head, const Steps& steps, uint8_t* tiles) {
  const int64_t here = std::min(kTileRows, q.group - head);
  std::fill_n(tiles, 2 * steps.count * kTileBytes, uint8_t{0});
  for (int64_t s = 0; s < steps.count; ++s, tiles += 2 * kTileBytes) {
    const int64_t first = s * steps.step_lines, offset = first - steps.First(s);
    const int64_t numbers = 4 * (std::min(steps.lines, first + steps.step_lines) - first);
    for (int64_t h = 0; h < here; ++h) {
      const int16_t* values = q.values.data() + (head + h) * 4 * steps.lines + 4 * first;
      uint8_t* low = tiles + h * kLineBytes + 4 * offset;
      for (int64_t c = 0; c < numbers; ++c) {
        low[c] = static_cast<uint8_t>(values[c] & 255);
        low[kTileBytes + c] = static_cast<uint8_t>(values[c] >> 8);
      }
    }
  }
}

// sums: low and high of the first block, low and high of the second one.
CARREL_AMX_INT8_INLINE void MultiplyPair(const uint8_t* first, const uint8_t* second,
                                         const uint8_t* queries, const Steps& steps,
                                         int32_t* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps.count; ++s, queries += 2 * kTileBytes) {
    const int64_t at = kLineBytes * (1 + steps.First(s));
    _tile_loadd(4, queries, kLineBytes);
    _tile_loadd(6, first + at, kLineBytes);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(5, queries + kTileBytes, kLineBytes);
    _tile_dpbssd(1, 5, 6);
    _tile_loadd(7, second + at, kLineBytes);
    _tile_dpbusd(2, 4, 7);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_stored(0, sums, kLineBytes);
  _tile_stored(1, sums + amx::kTileFloats, kLineBytes);
  _tile_stored(2, sums + 2 * amx::kTileFloats, kLineBytes);
  _tile_stored(3, sums + 3 * amx::kTileFloats, kLineBytes);
}

CARREL_AMX_INT8_INLINE void StoreScores(const int32_t* sums, const uint8_t* block,
                                        const float* query_scales, int64_t queries, float* out,
                                        int64_t stride, const uint8_t*& ahead, int64_t lines) {
  const __m512 scale = _mm512_loadu_ps(block);
  for (int64_t h = 0; h < queries; ++h) {
    const __m512i low = _mm512_load_si512(sums + h * 16);
    const __m512i high = _mm512_load_si512(sums + amx::kTileFloats + h * 16);
    const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
    const __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale),
                                        _mm512_set1_ps(query_scales[h]));
    _mm512_storeu_ps(out + h * stride, scaled);
    for (int64_t i = 0; i < lines; ++i, ahead += kLineBytes) __builtin_prefetch(ahead);
  }
}

// What waits to be written holds up the stores behind it, on which tiles wait.
CARREL_AMX_INT8_INLINE void AskToWrite(float* out, int64_t queries, int64_t stride) {
  for (int64_t h = 0; h < queries; ++h) {
    __builtin_prefetch(out + h * stride, 1);
    __builtin_prefetch(out + h * stride + 16, 1);
  }
}

}  // namespace

bool Int8TakesTiles(int64_t group) { return group >= kLeastQueries && AmxUsed(); }

void PackInt8Tiles(Int8Queries& q) {
  const Steps steps(q.dim);
  const int64_t tiles = amx::CeilDivide(q.group, kTileRows);
  q.tiles.resize(static_cast<size_t>(tiles * TileRunBytes(steps) / kLineBytes));
  for (int64_t i = 0; i < tiles; ++i) {
    PackQueries(q, i * kTileRows, steps,
                reinterpret_cast<uint8_t*>(q.tiles.data()) + i * TileRunBytes(steps));
  }
}

CARREL_AMX_INT8 void Int8ScoreByTiles(const Int8Queries& q, const void* blocks, int64_t count,
                                      float* out, int64_t stride) {
  const Steps steps(q.dim);
  const int64_t block_bytes = Int8BlockBytes(q.dim), run = TileRunBytes(steps);
  const auto* const packed = reinterpret_cast<const uint8_t*>(q.tiles.data());
  alignas(64) int32_t sums[4 * amx::kTileFloats];
  Configure(steps);
  for (int64_t from = 0; from < q.group; from += kPassQueries) {
    const int64_t end = std::min(q.group, from + kPassQueries);
    const auto* first = static_cast<const uint8_t*>(blocks);
    // The first pass asks for all: to the others the rows are near.
    const int64_t lines = from == 0 ? amx::CeilDivide(block_bytes, kLineBytes * end) : 0;
    for (int64_t i = 0; i < count; i += 2, first += 2 * block_bytes) {
      const bool pair = i + 1 < count;
      const uint8_t* const second = pair ? first + block_bytes : first;
      const uint8_t* ahead = first + 2 * block_bytes;
      for (int64_t h = from; h < end; h += kTileRows) {
        const int64_t here = std::min(kTileRows, end - h);
        float* const to = out + h * stride + i * kInt8BlockRows;
        MultiplyPair(first, second, packed + h / kTileRows * run, steps, sums);
        AskToWrite(to + 2 * kInt8BlockRows, here, stride);
        StoreScores(sums, first, &q.scale[static_cast<size_t>(h)], here, to, stride, ahead, lines);
        if (!pair) continue;
        StoreScores(sums + 2 * amx::kTileFloats, second, &q.scale[static_cast<size_t>(h)], here,
                    to + kInt8BlockRows, stride, ahead, lines);
      }
    }
  }
  _tile_release();
}

}  // namespace carrel::kernels

#else

namespace carrel::kernels {

bool Int8TakesTiles(int64_t) { return false; }

void PackInt8Tiles(Int8Queries&) {}

void Int8ScoreByTiles(const Int8Queries&, const void*, int64_t, float*, int64_t) {
  CARREL_CHECK(false);  // Int8TakesTiles() is false here
}

}  // namespace carrel::kernels
#endif
