// Sums of a group come out of the tiles while those of the group before are scaled and added up: a
// token's sums of 16 rows lie in a register, chain by chain.
#include "kernels/layer/quantized_linear/byte_panel_amx.h"

#include "common/status.h"
#include "kernels/amx.h"

#if defined(__x86_64__)

#include <type_traits>

#include "kernels/amx_tiles-inl.h"

namespace carrel::kernels {
namespace {

constexpr int64_t kRows = 16;  // of a vector, two of which are a panel
constexpr int64_t kPanelRows = 2 * kRows;
constexpr int64_t kGroupBytes = 32;  // of one row, or of one token's low or high bytes
constexpr int64_t kTileBytes = kRows * kGroupBytes;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kChains = kChunkGroups;

static_assert(sizeof(PackedChunk) % kLineBytes == 0);

// Sums of low and high bytes 0 and 1, tokens 4 and 5, rows 6.
CARREL_AMX_INT8 void Configure(int64_t tokens) {
  amx::TileConfig config;
  for (const int tile : {0, 1, 4, 5}) config.rows[tile] = static_cast<uint8_t>(tokens);
  for (const int tile : {4, 5}) config.row_bytes[tile] = kGroupBytes;
  config.rows[6] = kGroupBytes / 4;
  asm volatile("" ::"r"(&config) : "memory");  // all of it is read: the compiler knows of 8 bytes
  _tile_loadconfig(&config);
}

// What the tiles gave for a group.
struct alignas(64) GroupSums {
  int32_t low[kByteTokens][kRows];
  int32_t high[kByteTokens][kRows];
};

CARREL_AMX_INT8_INLINE void MultiplyGroup(const int8_t* rows, const uint8_t* tokens, int64_t stride,
                                          GroupSums& sums) {
  _tile_loadd(6, rows, kLineBytes);
  _tile_loadd(4, tokens, stride);
  _tile_zero(0);
  _tile_dpbusd(0, 4, 6);
  _tile_loadd(5, tokens + kGroupBytes, stride);
  _tile_zero(1);
  _tile_dpbssd(1, 5, 6);
  _tile_stored(0, sums.low, kLineBytes);
  _tile_stored(1, sums.high, kLineBytes);
}

// Scales and sums of kTokens tokens' groups, from one of a chunk on. Each address is a register of these,
// twice the stride at most, and a constant: the compiler would work out every one anew.
template <int kTokens>
struct TokenScales {
  const char* at[(kTokens + 2) / 3];
  int64_t stride;

  CARREL_AMX_INT8_INLINE TokenScales(const PackedChunk* chunk, int64_t bytes) : stride(bytes) {
#pragma GCC unroll 6
    for (int i = 0; i < (kTokens + 2) / 3; ++i) {
      at[i] = reinterpret_cast<const char*>(chunk->scales) + 3 * i * stride;
      asm volatile("" : "+r"(at[i]));  // it is not to know how they come from one another
    }
  }
  CARREL_AMX_INT8_INLINE void Move(int64_t bytes) {
#pragma GCC unroll 6
    for (int i = 0; i < (kTokens + 2) / 3; ++i) at[i] += bytes;
  }
  CARREL_AMX_INT8_INLINE const float* Of(int t) const {
    return reinterpret_cast<const float*>(at[t / 3] + t % 3 * stride);
  }
};

// A group of kTokens tokens joins their chains.
template <bool kMinimum, int kTokens>
CARREL_AMX_INT8_INLINE void AddGroup(const GroupSums& exact, const float* scales,
                                     const float* minima, const TokenScales<kTokens>& of,
                                     __m512 (&sums)[kTokens]) {
  const __m512 scale = _mm512_loadu_ps(scales);
  const __m512 minimum = kMinimum ? _mm512_loadu_ps(minima) : _mm512_setzero_ps();
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
    const __m512i high = _mm512_slli_epi32(_mm512_load_si512(exact.high[t]), 8);
    const __m512i sum = _mm512_add_epi32(high, _mm512_load_si512(exact.low[t]));
    const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(*of.Of(t)));
    sums[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), both, sums[t]);
    if (kMinimum) {
      sums[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(of.Of(t)[kChunkGroups]), sums[t]);
    }
  }
}

// kTokens tokens with one vector of rows.
template <bool kMinimum, int kTokens>
CARREL_AMX_INT8 __attribute__((noinline)) void MultiplyTokens(const BytePanel& panel,
                                                              int64_t vector, const PackedChunk* x,
                                                              int64_t chunks, __mmask16 real,
                                                              float* y, int64_t y_stride,
                                                              LinesAhead& next) {
  const int64_t stride = chunks * static_cast<int64_t>(sizeof(PackedChunk));
  const int8_t* const rows = panel.bytes + vector * kTileBytes;
  const float* const scales = panel.scales + vector * kRows;
  const float* const minima = panel.minima + vector * kRows;
  const auto multiply = [&](int64_t group, GroupSums& sums) CARREL_AMX_INT8 {
    const PackedChunk& chunk = x[group / kChunkGroups];
    const auto* const tokens = reinterpret_cast<const uint8_t*>(chunk.words);
    MultiplyGroup(rows + group * 2 * kTileBytes, tokens + group % kChunkGroups * kLineBytes, stride,
                  sums);
  };
  GroupSums exact[2];
  alignas(64) float totals[kTokens][kRows];
  TokenScales<kTokens> of(x, stride);
  constexpr int64_t kNextGroup = sizeof(float);
  constexpr int64_t kNextChunk = sizeof(PackedChunk) - (kChunkGroups - 1) * kNextGroup;
  multiply(0, exact[0]);
  for (int64_t chain = 0, group = 0; chain < kChains; ++chain) {
    const int64_t end = group + (panel.groups - chain + kChains - 1) / kChains;
    __m512 sums[kTokens];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) sums[t] = _mm512_setzero_ps();
    for (; group < end; ++group) {
      next.AskForSome();
      if (group + 1 < panel.groups) multiply(group + 1, exact[(group + 1) % 2]);
      AddGroup<kMinimum>(exact[group % 2], scales + group * kPanelRows, minima + group * kPanelRows,
                         of, sums);
      of.Move(group % kChunkGroups + 1 == kChunkGroups ? kNextChunk : kNextGroup);
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      const __m512 sum = chain == 0 ? sums[t] : _mm512_add_ps(_mm512_load_ps(totals[t]), sums[t]);
      _mm512_store_ps(totals[t], sum);
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    _mm512_mask_storeu_ps(y + t * y_stride + vector * kRows, real, _mm512_load_ps(totals[t]));
  }
}

// run(count), which the compiler knows; from 1 to kMost.
template <int kMost, class Run>
CARREL_AMX_INT8_INLINE void WithCount(int64_t count, const Run& run) {
  if constexpr (kMost > 1) {
    if (count < kMost) return WithCount<kMost - 1>(count, run);
  }
  run(std::integral_constant<int, kMost>());
}

}  // namespace

bool BytesTakeTiles() { return AmxUsed(); }

CARREL_AMX_INT8 void MultiplyBytePanel(const BytePanel& panel, bool minimum, const PackedChunk* x,
                                       int64_t n, int64_t chunks, int64_t real, float* y,
                                       int64_t y_stride, LinesAhead& next) {
  Configure(n);
  asm volatile("" ::: "memory");  // loads of tiles read panel and tokens
  WithCount<kByteTokens>(n, [&]<int kTokens>(std::integral_constant<int, kTokens>) CARREL_AMX_INT8 {
    for (int64_t vector = 0; vector * kRows < real; ++vector) {
      const int64_t here = std::min(kRows, real - vector * kRows);
      const auto mask = static_cast<__mmask16>((1u << here) - 1);
      const auto multiply =
          minimum ? MultiplyTokens<true, kTokens> : MultiplyTokens<false, kTokens>;
      multiply(panel, vector, x, chunks, mask, y, y_stride, next);
    }
  });
  _tile_release();
}

}  // namespace carrel::kernels

#else

namespace carrel::kernels {

bool BytesTakeTiles() { return false; }

void MultiplyBytePanel(const BytePanel&, bool, const PackedChunk*, int64_t, int64_t, int64_t,
                       float*, int64_t, LinesAhead&) {
  CARREL_CHECK(false);  // BytesTakeTiles() is false here
}

}  // namespace carrel::kernels
#endif
