// What:   causal attention of a tile of new tokens, some q heads of one KV head, over all earlier keys
//         and themselves; exact, blocked over keys (online softmax).
// Math:   out[i] = sum_{j <= first_position + i} softmax_j(scale * <q[i], k[j]>) v[j]
// Source: the online softmax of FlashAttention (Dao et al. 2022, algorithm 1), on a CPU: register
//         tiles over panels of queries that lie side by side in the lanes.
// Shapes: q [n, heads, head_dim] and out [n, heads, head_dim] f32 with row strides in elements (so that
//         some heads of [n, q_heads, head_dim] can be passed); k, v [>= first_position + n, head_dim]
//         f32 contiguous: the KV head's rows from position 0.
// Units:  scale includes 1/sqrt(head_dim); keys are after RoPE.
// Edge:   n == 0 does nothing. Logits of -1e4 and below are handled; a row always has at least its
//         own key. Rows after the tile's last token are never read.
// Threads: reentrant. One call handles at most kPrefillQueryTile tokens and is the unit that
//         callers spread over threads. Splitting tokens or heads anywhere changes no bit.
// Cost:   4 * n * heads * keys * head_dim flops; reads k and v once for all heads, whose queries and
//         sums stay in the cache meanwhile. n is rounded up to two vectors' width (32 with AVX-512).
#pragma once

#include <cstdint>

namespace carrel::kernels {

inline constexpr int64_t kPrefillQueryTile = 128;
inline constexpr int64_t kMostPrefillHeads = 8;

struct PrefillAttentionParams {
  const float* q = nullptr;
  int64_t q_stride = 0;
  int64_t n = 0;      // <= kPrefillQueryTile
  int64_t heads = 1;  // <= kMostPrefillHeads
  int64_t first_position = 0;
  const float* k = nullptr;
  const float* v = nullptr;
  int64_t head_dim = 0;
  float scale = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
  // Rows [0, first_position + n) and more by PackPrefillRows: k and v are not read. Or null.
  const float* packed = nullptr;
};

int64_t PrefillAttentionScratchFloats(int64_t head_dim, int64_t heads = 1);
// How many of a KV head's q heads go together, where there is work for all threads: keys and values of a long
// document come from memory, which many cores share, so they are to be read for several heads at once; what
// these carry is to stay in a core's own cache. A group's parts are of this size, the last one perhaps smaller.
int64_t PrefillHeadsTogether(int64_t group, int64_t head_dim);
void PrefillAttention(const PrefillAttentionParams& params, float* scratch);
void RefPrefillAttention(const PrefillAttentionParams& params);

// With AMX, and rows packed once for all queries and q heads that attend to them, products are taken
// in parts of bf16 (kernels/amx_tiles-inl.h, decision 046): a score is off by some 5e-6 of |q| |k|
// scale / sqrt(head_dim), an output by 5e-6 of itself besides, where f32 has 3e-7. Callers that attend
// to the same rows many times ask whether to pack.
bool PrefillAttentionPacksRows();
int64_t PackedPrefillRowsFloats(int64_t rows, int64_t head_dim);
// Rows [begin, end) of k and v into `packed`; rows [0, begin) are there already, and up to 31 of them
// are read and packed again. Packed rows after a tile's last token must be finite.
void PackPrefillRows(const float* k, const float* v, int64_t begin, int64_t end, int64_t head_dim,
                     float* packed);

}  // namespace carrel::kernels
