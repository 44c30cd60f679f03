#include "decoder/select/exact_selector.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "common/dtype.h"
#include "decoder/select/int8_keys.h"
#include "decoder/select/key_scores.h"
#include "decoder/select/method_type.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/bounded_topk/bounded_topk.h"
#include "kernels/select/topk/topk.h"

namespace carrel::decoder {
namespace {

constexpr int64_t kPieceRows = 2048;
// Rows that a thread scores at a time: some microseconds.
constexpr int64_t kExactRows = 128;

class ExactSelector final : public RowSelector {
 public:
  ExactSelector(const ExactConfig& config, const AttentionShape& shape, RowRange zone,
                const HostRows& rows, ThreadPool* pool)
      : shape_(shape), zone_(zone), rows_(rows), pool_(pool) {
    if (config.scan != ExactScan::kStored) int8_keys_.emplace(shape, zone, rows, pool);
  }

  void Select(const SelectRequest& request, SelectedRows& selection) override {
    thread_local std::vector<float> scores;
    const int64_t d = shape_.head_dim, n = zone_.rows();
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    const HeadView& rows = rows_.At(request.layer, request.head);
    const float* q = request.q;
    if (request.placement != nullptr) {
      if (request.placement->chunk_indexed) return SelectPlaced(request, rows, selection);
      // All keys stand at one distance: the queries are turned instead.
      thread_local std::vector<float> turned;
      turned.resize(static_cast<size_t>(request.queries * d));
      for (int64_t h = 0; h < request.queries; ++h) {
        request.placement->rope->Turn(q + h * d, request.placement->stream,
                                      &turned[static_cast<size_t>(h * d)]);
      }
      q = turned.data();
    }
    if (int8_keys_.has_value() && request.budget < n) return SelectByInt8(request, q, selection);
    scores.resize(static_cast<size_t>(request.queries * n));
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

  int64_t resident_bytes() const override {
    return int8_keys_.has_value() ? int8_keys_->resident_bytes() : 0;
  }

 private:
  // Scores in 8 bits leave out what is too low by more than their error; the others are scored from
  // the rows.
  void SelectByInt8(const SelectRequest& request, const float* q, SelectedRows& selection) {
    thread_local std::vector<float> scores, base, error, exact, placed, group_scores;
    thread_local std::vector<Position> candidates;
    thread_local std::vector<int64_t> best;
    thread_local std::vector<uint64_t> scratch;
    thread_local kernels::BoundedTopK bounded;
    const int64_t n = zone_.rows(), queries = request.queries;
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    scores.resize(static_cast<size_t>(queries * int8_keys_->stride()));
    base.resize(static_cast<size_t>(queries));
    error.resize(static_cast<size_t>(queries));
    int8_keys_->Score(request.layer, request.head, q, queries, scale, scores.data(), base.data(),
                      error.data());
    // Rows of the zone behind the candidates that there are; their scores, [queries, rows], and their group
    // scores behind the others'.
    const auto score = [&, &candidates = candidates, &exact = exact, &placed = placed,
                        &base = base](std::span<const int64_t> rows) {
      const size_t before = candidates.size();
      candidates.insert(candidates.end(), rows.begin(), rows.end());
      exact.resize(std::max(exact.size(), static_cast<size_t>(queries) * candidates.size()));
      placed.resize(candidates.size());
      ScoreExactly(request, q, rows, base.data(), exact.data() + queries * before,
                   placed.data() + before);
    };
    candidates.clear();
    score(
        bounded.First({scores.data(), queries, n, int8_keys_->stride(), base.data(), error.data()},
                      request.budget, pool_));
    const size_t first = candidates.size();
    score(bounded.Others(
        kernels::KthLargest(placed.data(), static_cast<int64_t>(first), request.budget)));
    const auto found = static_cast<int64_t>(candidates.size());
    const float* of_rows = placed.data();  // ascending, where there are no others
    std::span<const int32_t> ascending;
    if (candidates.size() > first) {
      ascending = bounded.Ascending();
      group_scores.resize(ascending.size());
      for (size_t i = 0; i < ascending.size(); ++i) {
        group_scores[i] = placed[static_cast<size_t>(ascending[i])];
      }
      of_rows = group_scores.data();
    }
    best.resize(static_cast<size_t>(std::min(request.budget, found)));
    kernels::TopKAscending(of_rows, found, request.budget, best.data(), scratch);
    float last = INFINITY;
    selection.rows.resize(best.size());
    for (size_t i = 0; i < best.size(); ++i) {
      last = std::min(last, of_rows[best[i]]);
      if (!ascending.empty()) best[i] = ascending[static_cast<size_t>(best[i])];
      selection.rows[i] = zone_.begin + candidates[static_cast<size_t>(best[i])];
    }
    selection.bound.clear();
    for (const float lse : base) selection.bound.push_back(last + lse);
    if (request.placement == nullptr) TakeScores(exact, queries, first, found, best, selection);
    selection.visited += n + found;
    selection.keys_scored += found;
    selection.bytes_read +=
        n * (shape_.head_dim + 4) + found * rows_.At(request.layer, request.head).row_bytes;
  }

  // Of rows of the zone: scores [queries, rows], scaled, and group scores.
  void ScoreExactly(const SelectRequest& request, const float* q, std::span<const int64_t> wanted,
                    const float* base, float* scores, float* group_scores) const {
    const HeadView& rows = rows_.At(request.layer, request.head);
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    const auto count = static_cast<int64_t>(wanted.size());
    pool_->ParallelFor((count + kExactRows - 1) / kExactRows, [&](int64_t part) {
      const void* keys[kExactRows];
      const int64_t begin = part * kExactRows, n = std::min(kExactRows, count - begin);
      for (int64_t i = 0; i < n; ++i) {
        keys[i] = rows.Key(zone_.begin + wanted[static_cast<size_t>(begin + i)]);
      }
      kernels::DotScoreRows(q, request.queries, shape_.head_dim, keys, n, scale, scores + begin,
                            count);
      kernels::GroupScore(scores + begin, request.queries, n, count, base, group_scores + begin);
    });
  }

  // Of the candidates at `places`; exact: [queries, first] of the first ones, [queries, others] behind.
  static void TakeScores(const std::vector<float>& exact, int64_t queries, size_t first,
                         int64_t found, const std::vector<int64_t>& places,
                         SelectedRows& selection) {
    const auto firsts = static_cast<int64_t>(first), others = found - firsts;
    selection.scores.resize(static_cast<size_t>(queries) * places.size());
    float* to = selection.scores.data();
    for (int64_t h = 0; h < queries; ++h) {
      const float* const of_first = exact.data() + h * firsts;
      const float* const of_others = exact.data() + (queries - 1) * firsts + h * others;
      for (const int64_t at : places) *to++ = at < firsts ? of_first[at] : of_others[at];
    }
  }

  // Chunk-indexed: every row is a chunk of its own, and stands as far away as it is.
  void SelectPlaced(const SelectRequest& request, const HeadView& rows,
                    SelectedRows& selection) const {
    thread_local std::vector<float> key, scores;
    scores.resize(static_cast<size_t>(request.queries * zone_.rows()));
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
  std::optional<Int8Keys> int8_keys_;
};

}  // namespace

std::unique_ptr<RowSelector> MakeExactSelector(const ExactConfig& config,
                                               const AttentionShape& shape, RowRange zone,
                                               const HostRows& rows, ThreadPool* pool) {
  return std::make_unique<ExactSelector>(config, shape, zone, rows, pool);
}

namespace {

class ExactMethodType final : public MethodType {
 public:
  absl::string_view name() const override { return "exact"; }
  absl::Status Parse(const MethodSettings& settings, SelectorConfig& config) const override {
    return settings.Set({{"scan", MethodSettings::OneOf<ExactScan>(config.exact.scan,
                                                                   {{"auto", ExactScan::kAuto},
                                                                    {"stored", ExactScan::kStored},
                                                                    {"int8", ExactScan::kInt8}})}});
  }
  std::string Describe(const SelectorConfig& config) const override {
    if (config.exact.scan == ExactScan::kAuto) return "";
    return config.exact.scan == ExactScan::kInt8 ? ":scan=int8" : ":scan=stored";
  }
  absl::Status ValidateCuda(const SelectorConfig& config) const override {
    if (config.exact.scan != ExactScan::kInt8) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "method=exact: scan=int8 is not made on a GPU, which scans keys as they are stored");
  }
  absl::StatusOr<std::unique_ptr<RowSelector>> Make(const SelectorConfig& config,
                                                    const SelectorInput& input) const override {
    return MakeExactSelector(config.exact, input.shape, input.zone, input.rows, input.pool);
  }
};

}  // namespace

const MethodType& ExactMethod() {
  static const ExactMethodType method;
  return method;
}

}  // namespace carrel::decoder
