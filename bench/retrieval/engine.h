// What:   figure 1 of the targets: retrieval and partial attention of one token, in every layer, by
//         the engine itself (kvstore/engine, in process): ATTEND of the top_k rows of each KV head,
//         layer after layer as a decoder asks.
// Math:   output_error: against ATTEND over all rows of the zone; recall and mass are not known.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "bench/retrieval/measure.h"

namespace carrel::bench {

struct EngineCase {
  std::string store_folder, name;
  int32_t as_layers = 0;  // 0: those of the context
  int64_t top_k = 512;
  int32_t effort = 0;
  int threads = 1;
  int64_t tokens = 32;  // queries asked at least once each
  double seconds = 3;
};

absl::StatusOr<Result> MeasureEngine(const EngineCase& c);

}  // namespace carrel::bench
