// As in the version for vectors, everything lies transposed: scores are K q^T, outputs V^T weights^T,
// so that the queries of a panel lie across the lanes and softmax runs across none. K and V^T are the
// left operands, packed once for all queries; q and the weights are the right ones.
#include "kernels/attention/prefill_attention/prefill_attention_amx.h"

#include "common/status.h"
#include "kernels/amx.h"

#if defined(__x86_64__)

#include "kernels/amx_tiles-inl.h"

namespace carrel::kernels {
namespace {

using amx::CeilDivide;
using amx::kTileColumns;
using amx::kTileElements;
using amx::kTileFloats;
using amx::kTileRows;

// Keys per step of the online softmax.
constexpr int64_t kKeyBlock = 128;
constexpr int64_t kPanel = 2 * kTileRows;  // queries
constexpr int64_t kAlignFloats = 16;

int64_t Padded(int64_t head_dim) { return CeilDivide(head_dim, kTileColumns) * kTileColumns; }

// Packed rows: for every kKeyBlock keys, K as tiles of rows [key tile][32 columns of it]{high, low},
// then V^T as tiles of rows [16 columns][32 keys]{high, low}.
struct PackedRows {
  uint16_t* data;
  int64_t padded;  // head_dim

  int64_t RowRun() const { return 2 * kTileRows * padded; }        // elements of 16 keys
  int64_t ColumnRun() const { return 2 * kTileRows * kKeyBlock; }  // of 16 columns of V
  uint16_t* k(int64_t key) const {
    return data + key / kKeyBlock * 4 * kKeyBlock * padded + key % kKeyBlock / kTileRows * RowRun();
  }
  uint16_t* v(int64_t key, int64_t column) const {
    return data + key / kKeyBlock * 4 * kKeyBlock * padded + 2 * kKeyBlock * padded +
           column / kTileRows * ColumnRun() + key % kKeyBlock / kTileColumns * 2 * kTileElements;
  }
};

float* Align(float* at) {
  const auto past = reinterpret_cast<uintptr_t>(at) / sizeof(float) % kAlignFloats;
  return past == 0 ? at : at + kAlignFloats - past;
}

PackedRows RowsAt(float* packed, int64_t head_dim) {
  return {reinterpret_cast<uint16_t*>(Align(packed)), Padded(head_dim)};
}

CARREL_AMX_INLINE __m512i InTurn(__m512i two) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), two);
}

// Two rows of 16 numbers as row `pair` of two tiles of pairs.
CARREL_AMX_INLINE void StorePair(__m512 first, __m512 second, int64_t pair, uint16_t* tiles) {
  __m512i parts[2];
  amx::Split(first, second, parts);
  _mm512_store_si512(tiles + pair * kTileColumns, InTurn(parts[0]));
  _mm512_store_si512(tiles + kTileElements + pair * kTileColumns, InTurn(parts[1]));
}

// Keys [key, key + 32) of V, of which `rows` exist.
CARREL_AMX void PackValues(const float* v, int64_t rows, int64_t head_dim, int64_t key,
                           const PackedRows& to) {
  for (int64_t c = 0; c < to.padded; c += kTileRows) {
    uint16_t* const tiles = to.v(key, c);
    const int64_t left = head_dim - c;
    for (int64_t j = 0; j < kTileColumns; j += 2) {
      const float* const at = v + j * head_dim + c;
      const __m512 first = j < rows && left > 0 ? amx::LoadFirst(at, left) : _mm512_setzero_ps();
      const __m512 second =
          j + 1 < rows && left > 0 ? amx::LoadFirst(at + head_dim, left) : _mm512_setzero_ps();
      StorePair(first, second, j / 2, tiles);
    }
    amx::TransposeTile(tiles);
    amx::TransposeTile(tiles + kTileElements);
  }
}

CARREL_AMX void PackKeys(const float* k, int64_t rows, int64_t head_dim, int64_t key,
                         const PackedRows& to) {
  amx::PackRows<2>(k, std::min(rows, kTileRows), head_dim, head_dim, 1.0f, to.k(key));
  const int64_t below = std::max<int64_t>(0, rows - kTileRows);
  amx::PackRows<2>(k + (below > 0 ? kTileRows * head_dim : 0), below, head_dim, head_dim, 1.0f,
                   to.k(key + kTileRows));
}

// What one panel of queries carries from key block to key block; arrays of the scratch.
struct Panel {
  uint16_t* q;  // tiles of pairs [2][head_dim / 32]{high, low}, scaled
  float* out;   // [2][head_dim][16], sum of weight * v
  float* max;   // [2][16], of scores in powers of two
  float* sum;   // [2][16], sum of weights
  int64_t head;
  int64_t first;  // position of the first query
  int64_t queries;
};

// What panels share; arrays of the scratch.
struct Work {
  float* scores;      // [2][kKeyBlock][16]
  uint16_t* weights;  // tiles of pairs [2][kKeyBlock / 32]{high, low}
};

CARREL_AMX void StartPanel(const PrefillAttentionParams& p, const Panel& panel) {
  const int64_t padded = Padded(p.head_dim), begin = panel.first - p.first_position;
  const float* const head = p.q + panel.head * p.head_dim;
  constexpr float kLog2E = 1.44269504f;
  for (int64_t t = 0; t < 2; ++t) {
    const int64_t rows = std::clamp<int64_t>(panel.queries - t * kTileRows, 0, kTileRows);
    const float* const q = head + (rows > 0 ? (begin + t * kTileRows) * p.q_stride : 0);
    amx::PackPairs<2>(q, rows, p.q_stride, p.head_dim, p.scale * kLog2E,
                      panel.q + t * 2 * kTileRows * padded);
  }
  std::fill_n(panel.out, kPanel * padded, 0.0f);
  std::fill_n(panel.max, kPanel, -std::numeric_limits<float>::infinity());
  std::fill_n(panel.sum, kPanel, 0.0f);
}

// Scores of `keys` keys, a multiple of 32, from first_key on.
CARREL_AMX void ScoreKeys(const PackedRows& rows, const Panel& panel, int64_t first_key,
                          int64_t keys, float* scores) {
  const int64_t steps = rows.padded / kTileColumns;
  for (int64_t j = 0; j < keys; j += kPanel) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint16_t* const k = rows.k(first_key + j);
    amx::AddProducts(k, k + rows.RowRun(), panel.q, panel.q + rows.RowRun(), steps);
    float* const left = scores + j * kTileRows;
    float* const right = left + kKeyBlock * kTileRows;
    _tile_stored(0, left, amx::kTileStride);
    _tile_stored(1, right, amx::kTileStride);
    _tile_stored(2, left + kTileFloats, amx::kTileStride);
    _tile_stored(3, right + kTileFloats, amx::kTileStride);
  }
}

// Scores [keys][16] of keys later than a query's own become -inf; the first query at `position`.
void MaskFuture(int64_t position, int64_t first_key, int64_t keys, float* scores) {
  for (int64_t j = std::max<int64_t>(0, position + 1 - first_key); j < keys; ++j) {
    const int64_t visible_from = std::min(kTileRows, first_key + j - position);
    std::fill_n(scores + j * kTileRows, visible_from, -std::numeric_limits<float>::infinity());
  }
}

// 2^x for x <= 0, exactly 0 below -126 and exactly 1 at 0; a polynomial of degree 5 in the distance
// from the nearest integer, relative error <= 2e-7; NaN stays NaN.
CARREL_AMX_INLINE __m512 PowerOfTwo(__m512 x) {
  const __mmask16 large = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ);
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.3333558e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(large, p, n);
}

// Scores [keys][16] become weights as tiles of pairs; what was summed up so far is scaled to the new
// maxima.
CARREL_AMX void SoftmaxStep(const float* scores, int64_t keys, int64_t padded, float* max_at,
                            float* sum_at, float* out, uint16_t* weights) {
  const __m512 old_max = _mm512_load_ps(max_at);
  __m512 max0 = old_max, max1 = old_max, max2 = old_max, max3 = old_max;
  for (int64_t j = 0; j < keys; j += 4) {
    max0 = _mm512_max_ps(max0, _mm512_load_ps(scores + j * 16));
    max1 = _mm512_max_ps(max1, _mm512_load_ps(scores + j * 16 + 16));
    max2 = _mm512_max_ps(max2, _mm512_load_ps(scores + j * 16 + 32));
    max3 = _mm512_max_ps(max3, _mm512_load_ps(scores + j * 16 + 48));
  }
  const __m512 max = _mm512_max_ps(_mm512_max_ps(max0, max1), _mm512_max_ps(max2, max3));
  __m512 sum0 = _mm512_setzero_ps(), sum1 = _mm512_setzero_ps();
  for (int64_t j = 0; j < keys; j += 2) {
    const __m512 first = PowerOfTwo(_mm512_sub_ps(_mm512_load_ps(scores + j * 16), max));
    const __m512 second = PowerOfTwo(_mm512_sub_ps(_mm512_load_ps(scores + j * 16 + 16), max));
    sum0 = _mm512_add_ps(sum0, first);
    sum1 = _mm512_add_ps(sum1, second);
    StorePair(first, second, j % kTileColumns / 2, weights + j / kTileColumns * 2 * kTileElements);
  }
  const __m512 kept = PowerOfTwo(_mm512_sub_ps(old_max, max));
  _mm512_store_ps(max_at, max);
  _mm512_store_ps(sum_at, _mm512_fmadd_ps(_mm512_load_ps(sum_at), kept, _mm512_add_ps(sum0, sum1)));
  if (_mm512_cmp_ps_mask(kept, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) return;
  for (int64_t c = 0; c < padded; ++c) {
    _mm512_store_ps(out + c * 16, _mm512_mul_ps(_mm512_load_ps(out + c * 16), kept));
  }
}

// out += V^T weights^T over `keys` keys, a multiple of 32.
CARREL_AMX void AddValues(const PackedRows& rows, int64_t first_key, int64_t keys,
                          const uint16_t* weights, float* out) {
  const int64_t steps = keys / kTileColumns;
  for (int64_t c = 0; c < rows.padded; c += 2 * kTileRows) {
    float* const left = out + c * kTileRows;
    float* const right = left + rows.padded * kTileRows;
    _tile_loadd(0, left, amx::kTileStride);
    _tile_loadd(1, right, amx::kTileStride);
    _tile_loadd(2, left + kTileFloats, amx::kTileStride);
    _tile_loadd(3, right + kTileFloats, amx::kTileStride);
    const uint16_t* const v = rows.v(first_key, c);
    amx::AddProducts(v, v + rows.ColumnRun(), weights, weights + rows.ColumnRun(), steps);
    _tile_stored(0, left, amx::kTileStride);
    _tile_stored(1, right, amx::kTileStride);
    _tile_stored(2, left + kTileFloats, amx::kTileStride);
    _tile_stored(3, right + kTileFloats, amx::kTileStride);
  }
}

// One panel passes over `visible` keys, kKeyBlock at most.
CARREL_AMX void PanelStep(const PackedRows& rows, const Panel& panel, int64_t first_key,
                          int64_t visible, const Work& work) {
  const int64_t keys = CeilDivide(visible, kTileColumns) * kTileColumns;
  ScoreKeys(rows, panel, first_key, keys, work.scores);
  for (int64_t t = 0; t < 2; ++t) {
    float* const scores = work.scores + t * kKeyBlock * kTileRows;
    const int64_t position = panel.first + t * kTileRows;
    if (first_key + keys - 1 > position) MaskFuture(position, first_key, keys, scores);
    SoftmaxStep(scores, keys, rows.padded, panel.max + t * kTileRows, panel.sum + t * kTileRows,
                panel.out + t * rows.padded * kTileRows, work.weights + t * rows.ColumnRun());
  }
  amx::Written();
  AddValues(rows, first_key, keys, work.weights, panel.out);
}

CARREL_AMX void WritePanel(const PrefillAttentionParams& p, const Panel& panel) {
  const int64_t padded = Padded(p.head_dim), begin = panel.first - p.first_position;
  float* const head = p.out + panel.head * p.head_dim;
  for (int64_t t = 0; t < 2; ++t) {
    const __m512 factor =
        _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(panel.sum + t * kTileRows));
    const int64_t rows = std::clamp<int64_t>(panel.queries - t * kTileRows, 0, kTileRows);
    for (int64_t c = 0; c < p.head_dim; c += 16) {
      float* const tile = panel.out + (t * padded + c) * 16;
      for (int64_t i = 0; i < 16; ++i) {
        _mm512_store_ps(tile + i * 16, _mm512_mul_ps(_mm512_load_ps(tile + i * 16), factor));
      }
      amx::TransposeTile(reinterpret_cast<uint16_t*>(tile));
      const int64_t columns = std::min<int64_t>(16, p.head_dim - c);
      float* to = head + (begin + t * kTileRows) * p.out_stride + c;
      for (int64_t i = 0; i < rows; ++i, to += p.out_stride) {
        _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << columns) - 1),
                              _mm512_load_ps(tile + i * 16));
      }
    }
  }
}

}  // namespace

bool PrefillAttentionPacksRows() { return AmxUsed(); }

int64_t PackedPrefillRowsFloats(int64_t rows, int64_t head_dim) {
  return kAlignFloats + 2 * CeilDivide(rows, kKeyBlock) * kKeyBlock * Padded(head_dim);
}

CARREL_AMX void PackPrefillRows(const float* k, const float* v, int64_t begin, int64_t end,
                                int64_t head_dim, float* packed) {
  const PackedRows rows = RowsAt(packed, head_dim);
  for (int64_t key = begin / kTileColumns * kTileColumns; key < end; key += kTileColumns) {
    PackKeys(k + key * head_dim, std::min(kTileColumns, end - key), head_dim, key, rows);
    PackValues(v + key * head_dim, std::min(kTileColumns, end - key), head_dim, key, rows);
  }
}

int64_t PrefillAttentionInPartsScratchFloats(int64_t head_dim, int64_t heads) {
  return 2 * kPanel * kKeyBlock + heads * kPrefillQueryTile * (2 * Padded(head_dim) + 2);
}

CARREL_AMX void PrefillAttentionInParts(const PrefillAttentionParams& p, float* scratch) {
  const int64_t padded = Padded(p.head_dim);
  const PackedRows rows = RowsAt(const_cast<float*>(p.packed), p.head_dim);
  const Work work{scratch, reinterpret_cast<uint16_t*>(scratch + kPanel * kKeyBlock)};
  float* next = scratch + 2 * kPanel * kKeyBlock;
  Panel panels[kMostPrefillHeads * kPrefillQueryTile / kPanel];
  const int64_t of_head = CeilDivide(p.n, kPanel), count = p.heads * of_head;
  for (int64_t i = 0; i < count; ++i) {
    Panel& panel = panels[i];
    panel.q = reinterpret_cast<uint16_t*>(next);
    panel.out = next + kPanel * padded;
    panel.max = panel.out + kPanel * padded;
    panel.sum = panel.max + kPanel;
    next = panel.sum + kPanel;
    panel.head = i / of_head;
    const int64_t begin = i % of_head * kPanel;
    panel.first = p.first_position + begin;
    panel.queries = std::min(kPanel, p.n - begin);
    StartPanel(p, panel);
  }
  const amx::TileScope tiles;
  amx::Written();
  // Blocks begin at multiples of kKeyBlock from position 0, whatever the tile, so that a token's
  // result does not depend on the tile it is in.
  for (int64_t key = 0; key < p.first_position + p.n; key += kKeyBlock) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t visible = panels[i].first + panels[i].queries - key;
      if (visible > 0) PanelStep(rows, panels[i], key, std::min(visible, kKeyBlock), work);
    }
  }
  for (int64_t i = 0; i < count; ++i) WritePanel(p, panels[i]);
}

}  // namespace carrel::kernels

#else

namespace carrel::kernels {

bool PrefillAttentionPacksRows() { return false; }
int64_t PackedPrefillRowsFloats(int64_t, int64_t) { return 0; }
void PackPrefillRows(const float*, const float*, int64_t, int64_t, int64_t, float*) {}
int64_t PrefillAttentionInPartsScratchFloats(int64_t, int64_t) { return 0; }
void PrefillAttentionInParts(const PrefillAttentionParams&, float*) {
  CARREL_CHECK(false);  // nothing was packed
}

}  // namespace carrel::kernels
#endif
