#include "lab/methods/zone_pieces.h"

#include <algorithm>
#include <limits>

#include "common/bf16.h"
#include "common/dtype.h"
#include "decoder/select/key_scores.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"

namespace carrel::decoder {

StandIns MakeStandIns(const AttentionShape& shape, const ZonePieces& pieces, int64_t width,
                      const HostRows& rows, ThreadPool* pool, const StandInOf& stand_in) {
  StandIns made(static_cast<size_t>(shape.layers) * shape.kv_heads);
  pool->ParallelFor(static_cast<int64_t>(made.size()), [&](int64_t i) {
    const HeadView& head = rows.At(Layer(static_cast<int32_t>(i / shape.kv_heads)),
                                   KvHead(static_cast<int32_t>(i % shape.kv_heads)));
    const int64_t d = shape.head_dim;
    std::vector<float> keys(static_cast<size_t>(pieces.rows * d)), one(static_cast<size_t>(width));
    std::vector<uint16_t>& out = made[static_cast<size_t>(i)];
    out.resize(static_cast<size_t>(pieces.count() * width));
    for (int64_t piece = 0; piece < pieces.count(); ++piece) {
      const RowRange range = pieces.Of(piece);
      for (Position row = range.begin; row < range.end; ++row) {
        WidenToFloat(DType::kBf16, head.Key(row), d,
                     &keys[static_cast<size_t>((row - range.begin) * d)]);
      }
      stand_in(keys.data(), range.rows(), d, one.data());
      FloatToBf16(one, &out[static_cast<size_t>(piece * width)]);
    }
  });
  return made;
}

void SelectPieces(const ZonePieces& pieces, const float* q, int64_t queries, int64_t width,
                  float scale, const std::vector<uint16_t>& stand_ins,
                  absl::Span<const int64_t> always, int64_t budget, SelectedRows& selection) {
  thread_local std::vector<float> scores, base, group_scores;
  const int64_t n = pieces.count(), room = std::max<int64_t>(1, budget / pieces.rows);
  scores.resize(static_cast<size_t>(queries * n));
  base.resize(static_cast<size_t>(queries));
  group_scores.resize(static_cast<size_t>(n));
  kernels::DotScore(q, queries, width, stand_ins.data(), n, scale, scores.data(), n);
  const float infinite = std::numeric_limits<float>::infinity();
  const auto kept = std::min(static_cast<int64_t>(always.size()), room / 2);
  const absl::Span<const int64_t> given = always.subspan(0, static_cast<size_t>(kept));
  for (int64_t h = 0; h < queries; ++h) {
    for (const int64_t piece : given) scores[static_cast<size_t>(h * n + piece)] = -infinite;
    base[static_cast<size_t>(h)] = kernels::LogSumExp(&scores[static_cast<size_t>(h * n)], n);
  }
  kernels::GroupScore(scores.data(), queries, n, n, base.data(), group_scores.data());
  for (const int64_t piece : given) group_scores[static_cast<size_t>(piece)] = infinite;
  for (const Position piece : BestIndices(group_scores, std::min(n, room))) {
    const RowRange range = pieces.Of(piece);
    for (Position row = range.begin; row < range.end; ++row) selection.rows.push_back(row);
  }
  if (static_cast<int64_t>(selection.rows.size()) > budget)
    selection.rows.resize(static_cast<size_t>(budget));
  selection.visited += n;
  selection.bytes_read += n * width * static_cast<int64_t>(sizeof(uint16_t));
}

}  // namespace carrel::decoder
