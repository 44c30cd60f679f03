// What:   the rows of one token and KV head that a query selects by top_k: from the index, from all
//         rows where top_k covers the zone, or among given candidates.
// Math:   as Index: largest group score first, ties by smaller id; scores exact and scaled.
// Errors: those of rows and indexes.     Threads: reentrant.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "kvstore/engine/open_context.h"

namespace carrel::kvstore {

struct SelectParams {
  const OpenContext* context = nullptr;
  const HeadRows* rows = nullptr;
  Layer layer;
  KvHead kv_head;
  RowRange zone;
  const float* queries = nullptr;  // [group, head_dim]
  int64_t top_k = 0;
  int64_t effort = 0;
};

struct Selected {
  std::vector<Position> ids;
  std::vector<float> scores;    // [group, ids.size()]
  std::vector<float> zone_lse;  // [group]: exact if zone_scored, else an estimate
  bool zone_scored = false;
  int64_t candidates = 0;
  int64_t visited = 0;
};

absl::Status SelectTopK(const SelectParams& params, Selected& selected);
// candidates: ascending, in the zone.
absl::Status SelectAmong(const SelectParams& params, absl::Span<const Position> candidates,
                         Selected& selected);

// [group]: ln of the sum of exponentials of all scores of the zone; -inf for an empty one.
absl::Status ZoneLse(const SelectParams& params, std::vector<float>& zone_lse);

}  // namespace carrel::kvstore
