// What:   what a token's attention of one layer takes in this host's memory, over rows that are made up and by what
//         a store in this process answers with: for the rates of plans (decoder/plan/rates.h).
// Errors: those of kvstore/.
// Cost:   milliseconds; 128 MiB of memory beside the rows.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/plan/rates.h"

namespace carrel::library {

// To every row of a zone of so many, or to `budget` > 0 of each KV head.
absl::StatusOr<decoder::TimedLayer> TimeHostLayer(const AttentionShape& shape, int64_t zone_rows,
                                                  int64_t budget, ThreadPool* pool);

}  // namespace carrel::library
