#include "kernels/attention/block_sparse_attention/block_sparse_attention.h"
#include "kernels/reference.h"

namespace carrel::kernels {
namespace {

// As a row or query of a rank, of `total`, stands by the table.
std::vector<float> Turned(const uint16_t* x, const BlockSparseAttentionParams& p, int64_t rank,
                          int64_t total) {
  const int64_t shared = std::max<int64_t>(0, total - p.table.positions);
  return RefTurned(x, p.head_dim, p.table, std::max<int64_t>(0, rank - shared), 1);
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
    const std::vector<float> q =
        Turned(p.q + ((token * p.kv_heads + kv_head) * p.group + h) * d, p, position, total);
    const auto score = [&](int64_t rank) {
      const Bf16* key = p.kv.k + (first + rows[static_cast<size_t>(rank)]) * d;
      return p.scale * RefDot(q.data(), Turned(key, p, rank, total).data(), d);
    };
    const auto value = [&](int64_t rank) {
      return p.kv.v + (first + rows[static_cast<size_t>(rank)]) * d;
    };
    RefAttend(position + 1, d, score, value, out + h * d);
  }
}

}  // namespace carrel::kernels
