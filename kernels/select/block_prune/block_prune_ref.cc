#include "kernels/reference.h"
#include "kernels/select/block_prune/block_prune.h"
#include "kernels/select/topk/topk.h"

namespace carrel::kernels {
namespace {

struct Range {
  int64_t begin, end;
  int64_t rows() const { return end - begin; }
};

class Unit {
 public:
  Unit(const BlockPruneParams& p, int64_t unit)
      : p_(p),
        unit_(unit),
        k_(p.kv.k + unit % p.kv_heads * p.kv.row_stride * p.head_dim),
        block_(unit / p.kv_heads) {}

  std::vector<Range> Stretches() const {
    const ChosenRowsHead& head = p_.in.heads[unit_];
    std::vector<Range> stretches;
    for (int64_t i = 0, left = head.rows; i < head.count; ++i) {
      const int64_t begin = p_.in.begins[unit_ * p_.in.stride + i];
      const int64_t rows = std::min<int64_t>(left, head.length);
      stretches.push_back({begin, begin + rows});
      left -= rows;
    }
    return stretches;
  }

  // Of a chunk that stands `back` chunks before the last.
  float Representative(Range chunk, int64_t back) const {
    const int64_t nearest = p_.layout.first(block_) - p_.layout.zone_end(block_) + 1;
    const int64_t d = p_.head_dim;
    const auto score = [&](int64_t row, bool later) {
      const std::vector<float> key = RefTurned(k_ + row * d, d, p_.table, nearest + back, -1);
      const uint16_t* queries = later || p_.left == nullptr ? p_.right : p_.left;
      return static_cast<float>(
          RefBestDot(queries + unit_ * p_.queries * d, p_.queries, key.data(), d));
    };
    return static_cast<float>(RefRepresentative(chunk.begin, chunk.end, score));
  }

 private:
  const BlockPruneParams& p_;
  const int64_t unit_;
  const uint16_t* const k_;
  const int64_t block_;
};

}  // namespace

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
  for (int64_t number = 0; number < p.layout.blocks() * p.kv_heads; ++number) {
    const Unit unit(p, number);
    const ChosenRowsHead& head = p.in.heads[number];
    int32_t* const out = p.out.begins + number * p.out.stride;
    if (head.rows <= p.wanted) {
      std::copy_n(p.in.begins + number * p.in.stride, head.count, out);
      p.out.heads[number] = head;
      continue;
    }
    std::vector<Range> chunks;
    for (const Range& stretch : unit.Stretches()) {
      for (int64_t at = stretch.begin; at < stretch.end; at += p.chunk) {
        chunks.push_back({at, std::min(stretch.end, at + p.chunk)});
      }
    }
    std::vector<float> scores;
    for (size_t i = 0; i < chunks.size(); ++i) {
      scores.push_back(unit.Representative(chunks[i], static_cast<int64_t>(chunks.size() - 1 - i)));
    }
    const std::vector<int64_t> best = RefBestIndices(scores, p.wanted / p.chunk);
    int64_t rows = 0;
    for (size_t i = 0; i < best.size(); ++i) {
      const Range& chunk = chunks[static_cast<size_t>(best[i])];
      out[i] = static_cast<int32_t>(chunk.begin);
      rows += chunk.rows();
    }
    p.out.heads[number] = {static_cast<int32_t>(best.size()), static_cast<int32_t>(p.chunk),
                           static_cast<int32_t>(rows)};
  }
}

}  // namespace carrel::kernels
