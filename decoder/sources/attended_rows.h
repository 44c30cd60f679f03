// What:   the rows of the document that the tokens of a trace attended to most, and how much: exact
//         softmax weights exp(score - lse) of each q head. Rows of the zone are asked of the store (want
//         = IDS: its index finds them, it scores them exactly); those that the decoder holds are given.
// Math:   scores are scaled by 1/sqrt(head_dim); lse is of all that the token attended to, prompt and
//         answer included, so that a token's shares over all rows add up to 1.
// Errors: DataLoss a reply that does not hold together; what the store answers.
// Threads: one.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/ids.h"
#include "decoder/sources/query_trace.h"

namespace carrel::retrieval {
class Session;
}

namespace carrel::decoder {

struct AttendedRow {
  int32_t layer = 0, q_head = 0;
  int32_t step = 0;  // the token of the answer that this was to give, from 0
  Position position = 0;
  float share = 0;  // (0, 1]
};

// What the store searches, and what one query may ask of it.
struct ZoneLimits {
  RowRange zone;
  int64_t max_top_k = 1, max_query_tokens = 1, max_result_bytes = 0;
};

inline constexpr int64_t kRowsPerToken = 32;  // of the zone that are asked for, per KV head
inline constexpr float kLeastShare = 0.01f;   // what is less is left out

// Adds those of one layer, in any order.
absl::Status AttendedInZone(const QueryTrace& trace, Layer layer, const AttentionShape& shape,
                            const ZoneLimits& limits, retrieval::Session* client,
                            std::vector<AttendedRow>& rows);

// Of rows [first, first + count) whose keys are here, k [count, head_dim] of one KV head.
void AttendedHere(const QueryTrace& trace, Layer layer, KvHead head, const AttentionShape& shape,
                  Position first, int64_t count, const float* k, std::vector<AttendedRow>& rows);

}  // namespace carrel::decoder
