#include "decoder/refine/exact_refiner.h"

#include <algorithm>
#include <cmath>

#include "common/dtype.h"
#include "decoder/refine/key_scores.h"
#include "kernels/dot_score/dot_score.h"

namespace carrel::decoder {
namespace {

constexpr int64_t kPieceRows = 2048;

class ExactRefiner final : public Refiner {
 public:
  ExactRefiner(const AttentionShape& shape, RowRange zone, const HostRows& rows, ThreadPool* pool)
      : shape_(shape), zone_(zone), rows_(rows), pool_(pool) {}

  void Select(const RefineRequest& request, Selection& selection) override {
    thread_local std::vector<float> scores;
    const int64_t d = shape_.head_dim, n = zone_.rows();
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    const HeadRows& rows = rows_.At(request.layer, request.head);
    scores.resize(static_cast<size_t>(request.queries * n));
    const float* q = request.q;
    if (request.placement != nullptr) {
      if (request.placement->chunk_indexed) return SelectPlaced(request, rows, scores, selection);
      // All keys stand at one distance: the queries are turned instead.
      thread_local std::vector<float> turned;
      turned.resize(static_cast<size_t>(request.queries * d));
      for (int64_t h = 0; h < request.queries; ++h) {
        request.placement->rope->Turn(q + h * d, request.placement->stream,
                                      &turned[static_cast<size_t>(h * d)]);
      }
      q = turned.data();
    }
    // Heads alone are too few to keep all cores busy.
    pool_->ParallelFor((n + kPieceRows - 1) / kPieceRows, [&, out = scores.data()](int64_t piece) {
      const Position end = std::min(zone_.end, zone_.begin + (piece + 1) * kPieceRows);
      for (Position at = zone_.begin + piece * kPieceRows; at < end;) {
        const int64_t count = rows.Contiguous(at, end);
        kernels::DotScore(q, request.queries, d, rows.Key(at), count, scale,
                          out + (at - zone_.begin), n);
        at += count;
      }
    });
    selection.visited += n;
    selection.keys_scored += n;
    selection.bytes_read += n * rows.row_bytes;
    SelectByGroupScore(scores, request.queries, zone_, request.budget, selection.rows,
                       selection.bound);
  }

 private:
  // Chunk-indexed: every row is a chunk of its own, and stands as far away as it is.
  void SelectPlaced(const RefineRequest& request, const HeadRows& rows, std::vector<float>& scores,
                    Selection& selection) const {
    thread_local std::vector<float> key;
    const KeyPlacement& placement = *request.placement;
    const int64_t d = shape_.head_dim, n = zone_.rows();
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    key.resize(static_cast<size_t>(d));
    for (int64_t j = 0; j < n; ++j) {
      WidenToFloat(DType::kBf16, rows.Key(zone_.begin + j), d, key.data());
      placement.rope->TurnBack(key.data(), placement.stream + n - 1 - j, key.data());
      for (int64_t h = 0; h < request.queries; ++h) {
        float sum = 0;
        for (int64_t c = 0; c < d; ++c) sum += request.q[h * d + c] * key[static_cast<size_t>(c)];
        scores[static_cast<size_t>(h * n + j)] = scale * sum;
      }
    }
    selection.visited += n;
    selection.keys_scored += n;
    selection.bytes_read += n * rows.row_bytes;
    SelectByGroupScore(scores, request.queries, zone_, request.budget, selection.rows,
                       selection.bound);
  }

  const AttentionShape shape_;
  const RowRange zone_;
  const HostRows& rows_;
  ThreadPool* const pool_;
};

}  // namespace

std::unique_ptr<Refiner> MakeExactRefiner(const AttentionShape& shape, RowRange zone,
                                          const HostRows& rows, ThreadPool* pool) {
  return std::make_unique<ExactRefiner>(shape, zone, rows, pool);
}

}  // namespace carrel::decoder
