#include "decoder/refine/exact_refiner.h"

#include <cmath>

#include "decoder/refine/key_scores.h"
#include "kernels/dot_score/dot_score.h"

namespace carrel::decoder {
namespace {

class ExactRefiner final : public Refiner {
 public:
  ExactRefiner(const AttentionShape& shape, RowRange zone, const HostRows& rows)
      : shape_(shape), zone_(zone), rows_(rows) {}

  void Select(const RefineRequest& request, Selection& selection) override {
    thread_local std::vector<float> scores;
    const int64_t d = shape_.head_dim, n = zone_.rows();
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    const HeadRows& rows = rows_.At(request.layer, request.head);
    scores.resize(static_cast<size_t>(request.queries * n));
    for (Position at = zone_.begin; at < zone_.end;) {
      const int64_t count = rows.Contiguous(at, zone_.end);
      kernels::DotScore(request.q, request.queries, d, rows.Key(at), count, scale,
                        scores.data() + (at - zone_.begin), n);
      at += count;
    }
    selection.visited += n;
    selection.keys_scored += n;
    selection.bytes_read += n * rows.row_bytes;
    SelectByGroupScore(scores, request.queries, zone_, request.budget, selection.rows);
  }

 private:
  const AttentionShape shape_;
  const RowRange zone_;
  const HostRows& rows_;
};

}  // namespace

std::unique_ptr<Refiner> MakeExactRefiner(const AttentionShape& shape, RowRange zone,
                                          const HostRows& rows) {
  return std::make_unique<ExactRefiner>(shape, zone, rows);
}

}  // namespace carrel::decoder
