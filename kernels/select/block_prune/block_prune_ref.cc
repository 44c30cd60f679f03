#include "kernels/reference.h"
#include "kernels/select/block_prune/block_prune.h"
#include "kernels/select/chunk_prune/chunk_prune.h"

namespace carrel::kernels {
void RefGatherBlockQueries(const BlockQueriesParams& p) {
  const int64_t queries = BlockQueries(p.layout.block_q, p.stride_q, p.group);
  for (int64_t unit = 0; unit < p.layout.blocks() * p.kv_heads; ++unit) {
    const int64_t block = unit / p.kv_heads, head = unit % p.kv_heads;
    const int64_t last = p.layout.tokens(block) - 1;
    const int64_t stream = p.layout.first(block) - p.layout.zone_end(block) + 1;
    for (int64_t row = 0; row < queries; ++row) {
      int64_t token = last - row / p.group * p.stride_q;
      if (token < 0) token = last;
      const int64_t q_head = head * p.group + row % p.group;
      const uint16_t* from =
          p.q + ((block * p.layout.block_q + token) * p.kv_heads * p.group + q_head) * p.head_dim;
      for (const bool later : {true, false}) {
        uint16_t* const out = later ? p.right : p.left;
        if (out == nullptr) continue;
        const std::vector<float> turned =
            RefTurned(from, p.head_dim, p.table, stream + (later ? 0 : 1), 1);
        for (int64_t c = 0; c < p.head_dim; ++c) {
          out[(unit * queries + row) * p.head_dim + c] = FloatToBf16(turned[c]);
        }
      }
    }
  }
}

void RefStartBlockPrune(const BlockLayout& layout, int64_t kv_heads, const ChosenRows& out) {
  for (int64_t unit = 0; unit < layout.blocks() * kv_heads; ++unit) {
    const auto rows = static_cast<int32_t>(layout.zone_rows(unit / kv_heads));
    out.begins[unit * out.stride] = static_cast<int32_t>(layout.sink(unit / kv_heads));
    out.heads[unit] = {rows > 0 ? 1 : 0, rows, rows};
  }
}

void RefBlockPrune(const BlockPruneParams& p) {
  for (int64_t unit = 0; unit < p.layout.blocks() * p.kv_heads; ++unit) {
    const ChosenRowsHead& head = p.in.heads[unit];
    const int32_t* const begins = p.in.begins + unit * p.in.stride;
    int32_t* const out = p.out.begins + unit * p.out.stride;
    if (head.rows <= p.wanted) {
      std::copy_n(begins, head.count, out);
      p.out.heads[unit] = head;
      continue;
    }
    std::vector<RowRange> stretches;
    for (int64_t i = 0, left = head.rows; i < head.count; left -= stretches[i++].rows()) {
      stretches.push_back({begins[i], begins[i] + std::min<int64_t>(left, head.length)});
    }
    const int64_t block = unit / p.kv_heads, d = p.head_dim;
    const int64_t nearest = p.layout.first(block) - p.layout.zone_end(block) + 1;
    const Bf16* const k = p.kv.k + unit % p.kv_heads * p.kv.row_stride * d;
    const auto score = [&](absl::Span<const ChunkProbe> probes, std::vector<float>& scores) {
      for (size_t i = 0; i < probes.size(); ++i) {
        const ChunkProbe& probe = probes[i];
        const std::vector<float> key =
            RefTurned(k + probe.row * d, d, p.table, nearest + probe.chunks_back, -1);
        const Bf16* const queries = probe.right || p.left == nullptr ? p.right : p.left;
        scores[i] = static_cast<float>(
            RefBestDot(queries + unit * p.queries * d, p.queries, key.data(), d));
      }
    };
    int32_t count = 0, rows = 0;
    for (const RowRange& chunk : KeepBestChunks(stretches, p.chunk, p.wanted, score)) {
      out[count++] = static_cast<int32_t>(chunk.begin);
      rows += static_cast<int32_t>(chunk.rows());
    }
    p.out.heads[unit] = {count, static_cast<int32_t>(p.chunk), rows};
  }
}

}  // namespace carrel::kernels
