// What:   what the selectors share: exact scores of chosen keys, the best of a list of scores.
// Threads: reentrant.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "common/ids.h"
#include "decoder/select/host_rows.h"
#include "decoder/select/row_selector.h"
#include "kernels/select/chunk_prune/chunk_prune.h"
#include "kernels/select/topk/topk.h"

namespace carrel::decoder {

// out[i] = max over the request's queries of <q, key of positions[i]>, unscaled (max-pooling over
// block and group). Counts the keys as scored and their bytes as read.
void MaxScores(const SelectRequest& request, const HeadView& rows, int64_t head_dim,
               absl::Span<const Position> positions, std::vector<float>& out,
               SelectedRows& selection);

// As MaxScores, for keys repositioned by request.placement.
void ScoreProbes(const SelectRequest& request, const HeadView& rows, int64_t head_dim,
                 absl::Span<const kernels::ChunkProbe> probes, std::vector<float>& out,
                 SelectedRows& selection);

using kernels::BestIndices;

// One row of group scores (kernels/score/group_score) of [queries, rows] scaled scores: the best `budget`
// of them, ascending. bound [queries]: no other row of the zone scores higher.
void SelectByGroupScore(const std::vector<float>& scores, int64_t queries, RowRange zone,
                        int64_t budget, std::vector<Position>& rows, std::vector<float>& bound);

// Candidates that are chosen for `budget` rows of a zone. kAutoOversample: as for codes.
int64_t CandidateCount(int64_t budget, int64_t oversample, RowRange zone);

// Leaves of selection.rows, the candidates (ascending), the `budget` best by group score of their
// exact scores; each query's lse is over the candidates. Counts their keys as scored and read.
void KeepBestByKeys(const SelectRequest& request, const HeadView& rows, int64_t head_dim,
                    SelectedRows& selection);

void AllRows(RowRange zone, std::vector<Position>& rows);

}  // namespace carrel::decoder
