#include <algorithm>
#include <cmath>
#include <vector>

#include "common/bf16.h"
#include "kernels/attention/block_sparse_attention/block_sparse_attention.h"

namespace carrel::kernels {
namespace {

// As a row or query of a rank, of `total`, stands by the table, rounded; as it is without one.
std::vector<double> Turned(const uint16_t* x, const BlockSparseAttentionParams& p, int64_t rank,
                           int64_t total) {
  const int64_t half = p.head_dim / 2;
  const int64_t position =
      std::max<int64_t>(0, rank - std::max<int64_t>(0, total - p.table.positions));
  std::vector<double> out(static_cast<size_t>(p.head_dim));
  for (int64_t c = 0; c < p.head_dim; ++c) out[c] = Bf16ToFloat(x[c]);
  if (p.table.angles == nullptr) return out;
  const float* cosines = p.table.angles + position * 2 * half;
  for (int64_t c = 0; c < half; ++c) {
    const double low = out[c], high = out[c + half];
    const double cosine = cosines[c], sine = cosines[half + c];
    out[c] = Bf16ToFloat(FloatToBf16(static_cast<float>(low * cosine - high * sine)));
    out[c + half] = Bf16ToFloat(FloatToBf16(static_cast<float>(high * cosine + low * sine)));
  }
  return out;
}

std::vector<int64_t> RowsOf(const BlockSparseAttentionParams& p, int64_t block, int64_t unit) {
  std::vector<int64_t> rows;
  const auto add = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) rows.push_back(row);
  };
  add(0, p.layout.sink(block));
  const ChosenRowsHead& head = p.chosen.heads[unit];
  for (int64_t i = 0, left = head.rows; i < head.count; ++i) {
    const int64_t begin = p.chosen.begins[unit * p.chosen.stride + i];
    const int64_t count = std::min<int64_t>(left, head.length);
    add(begin, begin + count);
    left -= count;
  }
  add(p.layout.zone_end(block), p.layout.first(block) + p.layout.tokens(block));
  return rows;
}

}  // namespace

void RefBlockSparseAttention(const BlockSparseAttentionParams& p, int64_t token, int64_t kv_head,
                             float* out) {
  const int64_t block = token / p.layout.block_q, i = token % p.layout.block_q, d = p.head_dim;
  const int64_t first = kv_head * p.kv.row_stride;
  const std::vector<int64_t> rows = RowsOf(p, block, block * p.kv_heads + kv_head);
  const auto total = static_cast<int64_t>(rows.size());
  const int64_t position = total - p.layout.tokens(block) + i;  // its rank
  for (int64_t h = 0; h < p.group; ++h) {
    const std::vector<double> q =
        Turned(p.q + ((token * p.kv_heads + kv_head) * p.group + h) * d, p, position, total);
    std::vector<double> scores;
    double maximum = -INFINITY;
    for (int64_t rank = 0; rank <= position; ++rank) {
      const std::vector<double> key =
          Turned(p.kv.k + (first + rows[static_cast<size_t>(rank)]) * d, p, rank, total);
      double score = 0;
      for (int64_t c = 0; c < d; ++c) score += q[c] * key[c];
      scores.push_back(score * p.scale);
      maximum = std::max(maximum, scores.back());
    }
    std::vector<double> sums(static_cast<size_t>(d));
    double total = 0;
    for (int64_t rank = 0; rank <= position; ++rank) {
      const double weight = std::exp(scores[static_cast<size_t>(rank)] - maximum);
      total += weight;
      const Bf16* value = p.kv.v + (first + rows[static_cast<size_t>(rank)]) * d;
      for (int64_t c = 0; c < d; ++c) sums[c] += weight * Bf16ToFloat(value[c]);
    }
    for (int64_t c = 0; c < d; ++c) out[h * d + c] = static_cast<float>(sums[c] / total);
  }
}

}  // namespace carrel::kernels
