// What:   the limits of an engine, all in one place. Validation rejects and never clips.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace carrel::kvstore {

struct EngineConfig {
  // Memory of this process, bytes: loaded indexes, and the pages of mapped rows and codes, of which
  // the layers that were not read for longest are let go (their pages stay in the page cache as
  // long as the kernel has room). >= 1 MiB; 0: half of what the process may use
  // (MachineMemoryBytes). Indexes alone never take more. What clients make it hold comes on top.
  int64_t memory_budget_bytes = 0;

  // Memory of this process for what clients make it hold, bytes: requests in flight, their results,
  // remembered candidates, parts that wait to be sent (ByteBudget). >= 16 MiB; 0: a quarter of
  // memory_budget_bytes, at least 64 MiB. It is not part of memory_budget_bytes.
  int64_t request_budget_bytes = 0;

  // Threads that search, open contexts and encode replies. 0: one per core; at most 1024.
  // Default: a kvstore process has the machine to itself.
  int32_t search_threads = 0;

  // Requests of all sessions that wait for a thread; one more is ResourceExhausted. 1 .. 2^20.
  // Default: 16 sessions with all that they may have in flight.
  int64_t queue_limit = 1024;

  // Contexts kept open: those with sessions and, least recently used first out, idle ones. 1 ..
  // 4096. Default: an open context costs mappings and chunk bits, not memory for its rows.
  int64_t max_open_contexts = 32;

  // Sessions open at a time. 1 .. 2^20. Default: far above what one machine serves well.
  int64_t max_sessions = 1024;

  // Rows per KV head that one query may ask for. 1 .. 2^20. Default: twice the largest budget that
  // top-k decoding papers use (9% of 256k tokens).
  int64_t max_top_k = 65536;

  // Tokens of one query. 1 .. 4096. Default: a block of prompt tokens, a bounded unit of work.
  int64_t max_query_tokens = 64;

  // Requests that one session may have in flight. 1 .. 65536. Default: one per layer of a large
  // model.
  int64_t max_in_flight = 64;

  // Rows of one FetchRows, counted over its heads. 1 .. 2^24. Default: 32 MiB of K and V at
  // head_dim 128.
  int64_t max_fetch_rows = 65536;

  // Memory for computed results (ids, scores, partial attention; not rows, which are copied as they
  // are sent) of one session's requests in flight; a request beyond it is ResourceExhausted.
  // >= 1 MiB. Default: 64 tokens of 32 q heads in 8 groups at top_k = 8192.
  int64_t max_result_bytes = int64_t{256} << 20;

  // Speculative queries whose candidates a session keeps, the latest; older ones are forgotten.
  // 1 .. 1024. Default: a decoder asks one layer ahead; this leaves room for several.
  int64_t max_candidate_sets = 8;

  // Bytes per second at which a thread reads all contexts of the store again and checks them
  // (background_checks.h). 0: off; at most 2^34. Default: off, as a store inside a command is gone
  // before it would matter; `carrel serve` has a default of its own.
  int64_t scrub_bytes_per_s = 0;

  // Seconds after which what an interrupted import or prefill left is removed, if nobody went on with
  // it (Store::RemoveOldImports, RemoveOldUnfinished). 0: never; at most ten years. Default: a week, as a failure that
  // happened on a Friday is seen to on Monday.
  int64_t import_age_s = 7 * 86400;

  // A reply is sent in parts of at most about this many bytes (one row is never split).
  // 4 KiB .. 32 MiB. Default: large enough to amortise a message, small enough to interleave.
  int64_t reply_part_bytes = int64_t{1} << 20;
};

// InvalidArgument names field, value and bounds.
absl::Status ValidateEngineConfig(const EngineConfig& config);

}  // namespace carrel::kvstore
