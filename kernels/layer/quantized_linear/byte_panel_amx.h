// What:   products of many tokens with a panel of rows in bytes, on AMX's tiles. Called by
//         byte_panel-inl.h, which fills the panel, alone.
// Math:   that of word_panel-inl.h: a token's words are low bytes (unsigned) and high ones (signed), and
//         256 times the products of these with 32 columns, plus those, are the sum that words have. It
//         is exact, what follows is rounded in the same order: the same bits.
// Shapes: [groups][2 times 16 rows][8 times 4 columns][16 rows][4] bytes, signed; scales and minima
//         [groups][32 rows]. Of four columns c .. c + 3 the bytes lie as c, c + 2, c + 1, c + 3. Tokens
//         are packed so, too (PackPanelInput): of a group first 32 low bytes, then 32 high ones.
// Threads: reentrant.
// Cost:   for 16 tokens, 16 rows and 32 columns two products of tiles and some 100 vector instructions.
#pragma once

#include <cstdint>

#include "kernels/layer/quantized_linear/packed_chunk.h"
#include "kernels/read_ahead.h"

namespace carrel::kernels {

// Tokens that meet a panel at a time.
inline constexpr int64_t kByteTokens = 16;

struct BytePanel {
  int8_t* bytes;
  float* scales;
  float* minima;
  int64_t groups;  // chain by chain
};

// Whether tiles are there.
bool BytesTakeTiles();

// y of n <= kByteTokens tokens, `chunks` apart, with the first `real` rows of the panel, whose minima
// count if `minimum`.
void MultiplyBytePanel(const BytePanel& panel, bool minimum, const PackedChunk* x, int64_t n,
                       int64_t chunks, int64_t real, float* y, int64_t y_stride, LinesAhead& next);

}  // namespace carrel::kernels
