// What:    counts what was answered, by want and index kind, under the names of docs/metrics.md.
// Threads: any.   Cost: a few atomic additions.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/histogram.h"

namespace carrel::kvstore {

// One per want of a query, and one for fetched rows.
enum class RequestKind : uint8_t { kIds = 0, kRows = 1, kValues = 2, kAttend = 3, kFetch = 4 };
inline constexpr int kRequestKinds = 5;
inline constexpr const char* kRequestKindNames[kRequestKinds] = {"ids", "rows", "values", "attend",
                                                                 "fetch"};

// Kept by the engine, added to by its sessions.
struct RequestLatencies {
  Histogram queued[kRequestKinds];    // from acceptance to a thread's start on it
  Histogram searched[kRequestKinds];  // from then until the reply can be taken
};

// Makes the series that alerts look at, at 0: from a counter that begins at 1 no increase is seen. Before
// the first scrape.
void DeclareMetrics();

// Which series count an index. index: as a manifest names it, "auto" among them; "" for requests that search none.
int IndexSeries(absl::string_view index);
void CountAnswer(RequestLatencies& latencies, RequestKind kind, int index_series,
                 absl::Duration queued, absl::Duration searched, int64_t rows);

// A request or session that a limit or a right turned away. reason: one of few fixed words ("queue",
// "sessions", "in_flight", "result_bytes", "open_contexts", "draining", ...).
void CountRefusal(absl::string_view reason);

// A request that ended with an error, or a session that ended otherwise than by its client's will.
// code: as absl::StatusCodeToString.
void CountError(absl::string_view code);
// What interrupted imports left and was removed for its age.
void CountImportsRemoved(int64_t imports);

}  // namespace carrel::kvstore
