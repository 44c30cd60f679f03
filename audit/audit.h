// What:   an audit of a context: its own indexes against exact search on the sampled queries that
//         are stored with it, per layer and KV head, at the context's effort and along a ladder of
//         efforts.
// Math:   see measure.h. Each query searches only what it could have seen; one whose zone is under
//         kLeastZonePerTopK * top_k rows is left out and counted. Of the rest `sample` are used,
//         spread evenly over the stored order, which is by position.
// Errors: InvalidArgument a field outside its bounds (names value and bounds); FailedPrecondition
//         the context has no sampled queries, none with a large enough zone, or is of a kind of
//         rows that this program does not read; DataLoss damaged bytes, or a manifest that does not
//         fit itself. Each names context, and layer and kv_head where it has them.
// Threads: heads are spread over the pool; each search runs on one thread.
// Cost:   per head and query one exact search, one attention over the zone, and a search for each
//         effort: about 1 s per 10M rows of K and V read and core. A head's index is held while it
//         is measured. Indexes that were built from sampled queries (graph, learned codes) or
//         chosen with them (auto) do better on these than on others:
//         AuditReport.built_from_queries.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "audit/measure.h"
#include "common/ids.h"
#include "kvstore/index/index.h"

namespace carrel {
class Progress;
class ThreadPool;
}  // namespace carrel
namespace carrel::kvstore {
class StoredContext;
}

namespace carrel::audit {

inline constexpr int64_t kLeastZonePerTopK = 4;
inline constexpr int64_t kDefaultSample = 32;
inline constexpr int64_t kMaxTopK = 65536;

struct AuditConfig {
  // Rows wanted per search, 1 .. kMaxTopK. 128: the decoder's default.
  int64_t top_k = 128;
  // Queries per layer and head, 1 .. those stored; none: all stored, at most kDefaultSample.
  std::optional<int64_t> sample;
  // First and last rows of the context that a decoder holds, >= 0. The decoder's defaults.
  int64_t sink = 4;
  int64_t local = 64;
  // Efforts to measure, 1 .. kMaxEffort; the first is the one that is judged. None: each head's own
  // is judged, among a ladder around it.
  std::vector<int32_t> efforts;
  // Recall that every head should reach, (0, 1]: then each head's least effort for it is sought by
  // doubling.
  std::optional<double> want_recall;
};

// The estimation term of a head as prefill measured it (carrel/v1/context.proto, HeadFidelity), at
// the most rows measured that are at most top_k. Errors are root mean squares, as a share of the
// head's outputs.
struct TermQuality {
  bool counted = false;  // false: it does not help the head, and is left out
  double spread_share = 0;
  int64_t rows = 0;
  double error = 0, error_without = 0;
};

struct HeadAudit {
  Layer layer;
  KvHead kv_head;
  kvstore::IndexParams params;
  int64_t index_bytes = 0;
  ExactQuality exact;
  Measured judged;
  std::vector<Measured> curve;      // one per step of AuditReport.steps
  std::optional<Measured> least;    // of want_recall; none if no effort reaches it
  std::optional<TermQuality> term;  // none: it was not measured
};

// A step of the curves: an effort of all heads, or a multiple of each head's own.
struct Step {
  double factor = 0;   // of the head's own effort; 0 if efforts were given
  int32_t effort = 0;  // 0 if the heads' efforts differ, and for flat
};

struct AuditReport {
  AuditConfig config;
  std::string context;
  std::string index_kind;  // as in the manifest: may be "auto"
  AttentionShape shape;
  int64_t tokens = 0;
  int64_t stored_queries = 0;       // per layer and q head
  int64_t small_zones = 0;          // of these, left out
  std::vector<Position> positions;  // of the queries used
  bool built_from_queries = false;
  std::vector<Step> steps;
  std::vector<HeadAudit> heads;  // [layers, kv_heads]
  int threads = 1;
  double seconds = 0;
};

absl::StatusOr<AuditReport> RunAudit(const kvstore::StoredContext& context,
                                     const AuditConfig& config, ThreadPool* pool,
                                     Progress& progress);

}  // namespace carrel::audit
