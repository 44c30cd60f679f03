// What:   a zone cut into equal pieces, each of which a row of numbers stands for: what the methods that
//         choose pieces of consecutive rows share.
// Math:   the stand-ins are scored by the queries as keys are, joined by group score (each query's lse over the
//         pieces that are not chosen anyway); the best budget / rows pieces, at least one, are chosen,
//         and of their rows the first `budget`.
// Shapes: stand-ins [pieces, width] bf16, width a multiple of head_dim; the last piece may be shorter.
// Threads: reentrant.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/select/host_rows.h"
#include "decoder/select/row_selector.h"

namespace carrel::decoder {

struct ZonePieces {
  RowRange zone;
  int64_t rows = 1;  // of a piece

  int64_t count() const { return (zone.rows() + rows - 1) / rows; }
  RowRange Of(int64_t piece) const {
    const Position begin = zone.begin + piece * rows;
    return {begin, begin + rows < zone.end ? begin + rows : zone.end};
  }
};

// Stand-ins of every head: [layers * kv_heads], each [pieces, width].
using StandIns = std::vector<std::vector<uint16_t>>;

// What a piece's keys, [rows, head_dim] f32, are written as: `width` numbers.
using StandInOf =
    std::function<void(const float* keys, int64_t rows, int64_t head_dim, float* stand_in)>;

StandIns MakeStandIns(const AttentionShape& shape, const ZonePieces& pieces, int64_t width,
                      const HostRows& rows, ThreadPool* pool, const StandInOf& stand_in);

// q [queries, width]: the queries as stand-ins want them. always: pieces that are chosen whatever they score, the
// first of them, up to half of what the budget has room for. Counts stand-ins as visited and their bytes as
// read.
void SelectPieces(const ZonePieces& pieces, const float* q, int64_t queries, int64_t width,
                  float scale, const std::vector<uint16_t>& stand_ins,
                  absl::Span<const int64_t> always, int64_t budget, SelectedRows& selection);

}  // namespace carrel::decoder
