#include "decoder/select/key_scores.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/dtype.h"
#include "decoder/select/selector_config.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/score/max_score/max_score.h"
#include "kernels/select/topk/topk.h"

namespace carrel::decoder {

void MaxScores(const SelectRequest& request, const HeadView& rows, int64_t head_dim,
               absl::Span<const Position> positions, std::vector<float>& out,
               SelectedRows& selection) {
  thread_local std::vector<const void*> keys;
  thread_local std::vector<float> scores;
  const auto n = static_cast<int64_t>(positions.size());
  keys.resize(positions.size());
  for (size_t i = 0; i < positions.size(); ++i) keys[i] = rows.Key(positions[i]);
  scores.resize(static_cast<size_t>(request.queries * n));
  kernels::DotScoreRows(request.q, request.queries, head_dim, keys.data(), n, 1.0f, scores.data(),
                        n);
  out.assign(scores.begin(), scores.begin() + n);
  for (int64_t h = 1; h < request.queries; ++h) {
    for (int64_t i = 0; i < n; ++i) {
      out[static_cast<size_t>(i)] =
          std::max(out[static_cast<size_t>(i)], scores[static_cast<size_t>(h * n + i)]);
    }
  }
  selection.visited += n;
  selection.keys_scored += n;
  selection.bytes_read += n * rows.row_bytes;
}

void ScoreProbes(const SelectRequest& request, const HeadView& rows, int64_t head_dim,
                 absl::Span<const kernels::ChunkProbe> probes, std::vector<float>& out,
                 SelectedRows& selection) {
  if (request.placement == nullptr) {
    thread_local std::vector<Position> positions;
    positions.clear();
    for (const kernels::ChunkProbe& probe : probes) positions.push_back(probe.row);
    return MaxScores(request, rows, head_dim, positions, out, selection);
  }
  thread_local std::vector<float> keys;
  const auto n = static_cast<int64_t>(probes.size());
  const KeyPlacement& placement = *request.placement;
  keys.resize(static_cast<size_t>(n * head_dim));
  out.assign(probes.size(), -INFINITY);
  for (int64_t i = 0; i < n; ++i) {
    const kernels::ChunkProbe& probe = probes[static_cast<size_t>(i)];
    float* key = &keys[static_cast<size_t>(i * head_dim)];
    WidenToFloat(DType::kBf16, rows.Key(probe.row), head_dim, key);
    const int64_t further = placement.chunk_indexed ? probe.chunks_back : (probe.right ? 0 : 1);
    placement.rope->TurnBack(key, placement.stream + further, key);
  }
  kernels::MaxScore(kernels::QueryPanels(request.q, request.queries, head_dim), keys.data(), n,
                    out.data());
  selection.visited += n;
  selection.keys_scored += n;
  selection.bytes_read += n * rows.row_bytes;
}

void SelectByGroupScore(const std::vector<float>& scores, int64_t queries, RowRange zone,
                        int64_t budget, std::vector<Position>& rows, std::vector<float>& bound) {
  thread_local std::vector<float> base, group_scores;
  const int64_t n = zone.rows();
  base.resize(static_cast<size_t>(queries));
  for (int64_t h = 0; h < queries; ++h) {
    base[static_cast<size_t>(h)] = kernels::LogSumExp(&scores[static_cast<size_t>(h * n)], n);
  }
  group_scores.resize(static_cast<size_t>(n));
  kernels::GroupScore(scores.data(), queries, n, n, base.data(), group_scores.data());
  rows = BestIndices(group_scores, budget);
  float last = INFINITY;
  for (const Position row : rows) last = std::min(last, group_scores[static_cast<size_t>(row)]);
  bound.clear();
  for (const float lse : base) bound.push_back(last + lse);
  for (Position& row : rows) row += zone.begin;
}

int64_t CandidateCount(int64_t budget, int64_t oversample, RowRange zone) {
  const int64_t wanted = oversample == kAutoOversample
                             ? std::max(kLeastCandidates, kHashOversample * budget)
                             : budget * oversample;
  return std::min(zone.rows(), wanted);
}

void KeepBestByKeys(const SelectRequest& request, const HeadView& rows, int64_t head_dim,
                    SelectedRows& selection) {
  const auto n = static_cast<int64_t>(selection.rows.size());
  if (n <= request.budget) return;
  thread_local std::vector<const void*> keys;
  thread_local std::vector<float> scores;
  thread_local std::vector<Position> best;
  keys.resize(selection.rows.size());
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = rows.Key(selection.rows[i]);
  scores.resize(static_cast<size_t>(request.queries * n));
  kernels::DotScoreRows(request.q, request.queries, head_dim, keys.data(), n,
                        1.0f / std::sqrt(static_cast<float>(head_dim)), scores.data(), n);
  SelectByGroupScore(scores, request.queries, {0, n}, request.budget, best, selection.bound);
  // Ascending places in an ascending list: none is written before it is read.
  for (size_t i = 0; i < best.size(); ++i) {
    selection.rows[i] = selection.rows[static_cast<size_t>(best[i])];
  }
  selection.rows.resize(best.size());
  selection.visited += n;
  selection.keys_scored += n;
  selection.bytes_read += n * rows.row_bytes;
}

void AllRows(RowRange zone, std::vector<Position>& rows) {
  rows.resize(static_cast<size_t>(zone.rows()));
  std::iota(rows.begin(), rows.end(), zone.begin);
}

}  // namespace carrel::decoder
