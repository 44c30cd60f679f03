// What:   the rows with the largest exact group scores: what every other method approximates.
// Math:   decision 004: max_h (scale * <q[h], k[j]> - lse[h]) with lse over the zone; ties by
//         smaller id. The same rows as a flat index finds.
// Source: Exact top-k decoding (docs/methods.md), Algorithm 1, with a scan as its index.
// Ownership: rows and pool outlive it.
// Cost:   reads every key of the zone once per token, spread over the pool. A zone that
//         a session looks through (ScansHere) is scanned in 8 bits instead (kvstore/index/int8_scan.h).
#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "common/dtype.h"
#include "decoder/select/key_scores.h"
#include "decoder/select/method_type.h"
#include "decoder/select/row_selector.h"
#include "kernels/score/dot_score/dot_score.h"

namespace carrel::decoder {
namespace {

constexpr int64_t kPieceRows = 2048;

class ExactSelector final : public RowSelector {
 public:
  ExactSelector(const AttentionShape& shape, RowRange zone, const HostRows& rows, ThreadPool* pool)
      : shape_(shape), zone_(zone), rows_(rows), pool_(pool) {}

  void Select(const SelectRequest& request, SelectedRows& selection) override {
    thread_local std::vector<float> scores;
    const int64_t n = zone_.rows();
    const HeadView& rows = rows_.At(request.layer, request.head);
    scores.resize(static_cast<size_t>(request.queries * n));
    if (request.placement != nullptr && request.placement->chunk_indexed) {
      ScorePlaced(request, rows, scores);
    } else {
      Score(request, rows, scores.data());
    }
    selection.visited += n;
    selection.keys_scored += n;
    selection.bytes_read += n * rows.row_bytes;
    SelectByGroupScore(scores, request.queries, zone_, request.budget, selection.rows,
                       selection.bound);
  }

 private:
  void Score(const SelectRequest& request, const HeadView& rows, float* scores) const {
    const int64_t d = shape_.head_dim, n = zone_.rows();
    const float* q = request.q;
    if (request.placement != nullptr) {
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
    pool_->ParallelFor((n + kPieceRows - 1) / kPieceRows, [&](int64_t piece) {
      const Position end = std::min(zone_.end, zone_.begin + (piece + 1) * kPieceRows);
      for (Position at = zone_.begin + piece * kPieceRows; at < end;) {
        const int64_t count = rows.Contiguous(at, end);
        kernels::DotScore(q, request.queries, d, rows.Key(at), count, scale_,
                          scores + (at - zone_.begin), n);
        at += count;
      }
    });
  }

  // Chunk-indexed: every row is a chunk of its own, and stands as far away as it is.
  void ScorePlaced(const SelectRequest& request, const HeadView& rows,
                   std::vector<float>& scores) const {
    thread_local std::vector<float> key;
    const KeyPlacement& placement = *request.placement;
    const int64_t d = shape_.head_dim, n = zone_.rows();
    key.resize(static_cast<size_t>(d));
    for (int64_t j = 0; j < n; ++j) {
      WidenToFloat(DType::kBf16, rows.Key(zone_.begin + j), d, key.data());
      placement.rope->TurnBack(key.data(), placement.stream + n - 1 - j, key.data());
      for (int64_t h = 0; h < request.queries; ++h) {
        float sum = 0;
        for (int64_t c = 0; c < d; ++c) sum += request.q[h * d + c] * key[static_cast<size_t>(c)];
        scores[static_cast<size_t>(h * n + j)] = scale_ * sum;
      }
    }
  }

  const AttentionShape shape_;
  const RowRange zone_;
  const HostRows& rows_;
  ThreadPool* const pool_;
  const float scale_ = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
};

class ExactMethodType final : public MethodType {
 public:
  absl::string_view name() const override { return "exact"; }
  absl::Status Parse(const MethodSettings& settings, SelectorConfig&) const override {
    return settings.Set({});
  }
  absl::Status ValidateCuda(const SelectorConfig&) const override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<RowSelector>> Make(const SelectorConfig&,
                                                    const SelectorInput& input) const override {
    return std::make_unique<ExactSelector>(input.shape, input.zone, input.rows, input.pool);
  }
};

}  // namespace

const MethodType& ExactMethod() {
  static const ExactMethodType method;
  return method;
}

}  // namespace carrel::decoder
