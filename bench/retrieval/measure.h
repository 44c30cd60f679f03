// What:   one kind over the heads of a case: build, check, judge, time; a Result per top_k and
//         effort.
// Units:  a sample of ms_per_token is the wall time in which all measured heads answer one query on
//         all threads, times what they are of the whole context. Between samples as many bytes are
//         read as the heads that were not measured would have pushed through the cache.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/retrieval/case.h"
#include "bench/retrieval/method.h"

namespace carrel::bench {

struct Result {
  std::string context;
  int64_t tokens = 0;
  std::string kind;
  bool peer = false;
  bool synthetic = false;
  int64_t top_k = 0;
  int32_t effort = 0;
  std::string effort_name;
  Quality quality;
  double ms_per_token = 0, ms_per_token_p10 = 0, ms_per_token_p90 = 0;
  double search_us = 0;  // median of one head's search for its group
  double cold_ms = -1;   // of the first token after opening, page cache dropped; -1: not measured
  double cold_resident = 0;  // share of the files still in memory when it was measured
  double bytes_per_key = 0;
  double build_s = 0;  // of the whole context on all threads
  int32_t layers_measured = 0, as_layers = 0;
  int64_t heads_measured = 0, queries = 0, samples = 0;
  int threads = 0;
  std::string note;
};

struct MeasureConfig {
  std::vector<int64_t> top_ks;
  int threads = 1;
  int64_t samples = 32;  // timed, at least, per top_k and effort
  double seconds = 1.0;  // after which no more are taken than one per query
};

struct Measured {
  std::vector<Result> results;
  std::vector<std::string> blobs;  // per head; empty if the kind has none to store
};

// Unimplemented if the kind is not there yet.
absl::StatusOr<Measured> Measure(const Case& c, const MethodKind& kind, const MeasureConfig& config,
                                 ThreadPool& pool);

void PrintJson(const Result& result);                 // a line on standard output
void PrintTable(const std::vector<Result>& results);  // on standard error

}  // namespace carrel::bench
