// What:   a request for the estimation term: the rows of one token's zone that were not selected, as the summaries
//         of their clusters tell them (decision 017; how, says kvstore/index/summaries/summaries.h).
// Shapes: of one KV head, whose q heads are a group; all f32.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "common/ids.h"

namespace carrel {
class ThreadPool;
}

namespace carrel::retrieval {

struct EstimateRequest {
  const float* queries = nullptr;  // [group, head_dim]
  int64_t group = 0;
  float scale = 0;
  RowRange zone;
  absl::Span<const Position> selected;  // of all heads of the group; in the zone, each once
  const float* scores = nullptr;        // [group, selected], scaled; or null
  const float* bound = nullptr;         // [group]: no other row scores higher; or null
  // Instead of what the summaries say of it, and of the term: an estimate for each.
  absl::Span<const float> spread_shares;
  ThreadPool* pool = nullptr;  // who else takes segments of rows; or null
  float* out = nullptr;        // [group, head_dim], or [shares, group, head_dim]
  float* lse = nullptr;  // [group], or [shares, group]; -inf (and out 0) if nothing is left over
};

}  // namespace carrel::retrieval
