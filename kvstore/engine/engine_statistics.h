// What:    what an engine did and holds: latencies by kind of request, indexes, memory.
// Threads: any.
#pragma once

#include <cstdint>

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

struct EngineStatistics {
  struct Kind {
    Histogram::Summary queued, searched;
  };
  Kind kinds[kRequestKinds];
  int64_t sessions = 0;
  int64_t open_contexts = 0;
  int64_t waiting = 0;         // requests
  int64_t refused = 0;         // requests, for want of room in the queue
  int64_t resident_bytes = 0;  // of the process, all kinds
  int64_t mapped_bytes = 0;    // of them: pages of files
  int64_t request_bytes = 0;   // requests in flight, results, candidates
  int64_t part_bytes = 0;      // parts of replies that wait to be sent
  int64_t request_budget_bytes = 0;
  int64_t requests_refused_bytes = 0;  // requests, for want of room in the request budget
  int64_t index_bytes = 0;             // heap of loaded indexes, and of keys kept in 8 bits
  int64_t index_loads = 0, index_evictions = 0;
  int64_t layers_released = 0;  // for the memory budget
  int64_t layers_loaded = 0;    // whole, behind the searches
  int64_t memory_budget_bytes = 0;
  int64_t files_changed = 0;  // times that a file of an open context was found written to
  int64_t files_damaged = 0;  // files of open contexts that could not be read any more
  int64_t scrubbed_bytes = 0;
  int64_t scrub_passes = 0;    // over all contexts of the store
  int64_t scrub_failures = 0;  // damaged files found, again in each pass
};

}  // namespace carrel::kvstore
