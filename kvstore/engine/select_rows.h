// What:   the rows of one token and KV head that a query selects, from the index, from all rows
//         where it asks for the whole zone, or among given candidates.
// Math:   as Index: largest group score first, ties by smaller id, or by_id; scores exact and scaled.
//         range: rows j with max_h (score[h, j] - max_i score[h, i]) >= -range. mass: the shortest
//         run of the best rows with sum_j exp(score[h, j] - lse[h]) >= mass for every q head h.
//         Both ask the index for more and more rows until what it gives reaches past the last row
//         that qualifies, or is max_rows. Under an approximate index best score and lse are those
//         of what it finds, and its estimate. mass asks flat for the exact lse; by top_k and range a
//         flat head is scanned in 8 bits (kvstore/index/int8_scan.h), which says of groups what is.
// Errors: those of rows and indexes.     Threads: reentrant.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/ids.h"
#include "kvstore/engine/candidate_set.h"
#include "kvstore/engine/open_context.h"
#include "kvstore/engine/request.h"

namespace carrel::kvstore {

struct SelectParams {
  const OpenContext* context = nullptr;
  const MappedHead* rows = nullptr;
  Layer layer;
  KvHead kv_head;
  RowRange zone;
  const float* queries = nullptr;                // [group, head_dim]
  const select::Selection* selection = nullptr;  // not All; max_rows >= 1
  int64_t effort = 0;
  bool scan = false;                   // of every row, whatever the index
  const float* zone_scores = nullptr;  // as SearchRequest's
  Int8ZoneScores int8_scores;          // likewise; none: without scores
  bool exact_lse = false;              // likewise; WantsExactLse
  bool by_id = false;                  // likewise; by mass, and among candidates, best first
  ThreadPool* pool = nullptr;          // likewise
};

struct Selected {
  std::vector<Position> ids;
  std::vector<float> scores;    // [group, ids.size()]
  std::vector<float> zone_lse;  // [group]: exact if zone_scored, else an estimate
  bool zone_scored = false;
  std::vector<float> bound;  // [group]: no other row of the zone scores higher, as far as the
                             // index sees; none if nothing was selected
  int64_t candidates = 0;
  int64_t visited = 0;

  void Clear();  // keeps the vectors' memory
};

// Whether the selection itself depends on the zone's lse beyond the weight between heads.
bool WantsExactLse(const select::Selection& selection);
// Whether the first search of a flat head by this selection looks at keys in 8 bits.
bool ScansInInt8(const select::Selection& selection, KvHead kv_head, int64_t zone_rows);

// In place of what was selected, as SelectAmong.
absl::Status SelectRows(const SelectParams& params, Selected& selected);
// By top_k. candidates: in the zone. A group score is taken over the zone, whose lse is that over the
// candidates, exactly, and their rest: asked by the query that found them, they give its own best
// rows.
absl::Status SelectAmong(const SelectParams& params, const CandidateIds& candidates,
                         Selected& selected);
// What the zone weighs beside what a search selected.
absl::StatusOr<ZoneRest> RestOf(const SelectParams& params, const Selected& selected);
// What is kept of a search that found `selected`, whose ids move.
absl::StatusOr<CandidateIds> KeepCandidates(const SelectParams& params, Selected& selected);

// [group]: ln of the sum of exponentials of all scores of the zone; -inf for an empty one.
absl::Status ZoneLse(const SelectParams& params, std::vector<float>& zone_lse);

}  // namespace carrel::kvstore
