// What:   attention over every row of a zone at the store: mapped rows are streamed once, in
//         blocks, for all tokens of a query.
// Math:   the zone is cut into spans and these into blocks of kAttendBlockRows rows; (out, lse) of
//         blocks are merged in order within a span and those of spans in order. The cut depends on
//         the zone alone: results have the same bits on any number of threads.
// Errors: DataLoss from rows; Cancelled.     Threads: reentrant; a span is the unit of work, or a block, where
//         tokens are few and spans too few for many threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/ids.h"
#include "kvstore/engine/open_context.h"

namespace carrel::kvstore {

inline constexpr int64_t kAttendBlockRows = 512;
inline constexpr int64_t kAttendSpanRows = 1024;  // at least, and a multiple of a block
inline constexpr int64_t kAttendMaxSpans = 32;

// Of every span of the zone but the last.
int64_t AttendSpanLength(RowRange zone);

// What threads take, in order: the spans, or their blocks; none for an empty zone.
std::vector<RowRange> AttendCut(RowRange zone, int64_t tokens, int64_t kv_heads, int threads);
// The most that AttendCut returns, whatever the heads and threads.
int64_t AttendMostCut(RowRange zone, int64_t tokens);

struct AttendSpanParams {
  const MappedHead* rows = nullptr;
  RowRange span;
  const float* queries = nullptr;  // the group's first q head of token 0: [tokens][group, head_dim]
  int64_t tokens = 0;
  int64_t query_stride = 0;  // floats between tokens
  int64_t group = 0;
  float scale = 0;
  const std::atomic<bool>* cancelled = nullptr;
  float* out = nullptr;  // the same of the result, [tokens][group, head_dim]
  int64_t out_stride = 0;
  float* lse = nullptr;  // [tokens][group]
  int64_t lse_stride = 0;
};

absl::Status AttendSpan(const AttendSpanParams& params);

}  // namespace carrel::kvstore
