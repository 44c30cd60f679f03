// What:   the rates of this machine for a model's shape (decoder/plan/rates.h), measured once and kept in a file of
//         the user's cache folder (model::DigestCache::DefaultFolder): plans stay the same until they are measured again.
// Edge:   a file that is damaged, or of another version, is as none. Without a cache folder they last as long as the process.
// Cost:   the first call of a shape reads a file, or measures (a second) and writes it. Without a cache folder a
//         CPU's rates are assumed: a process of its own for each question would measure each time.
// Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/plan/rates.h"
#include "model/device.h"

namespace carrel::library {

absl::StatusOr<std::shared_ptr<const decoder::Rates>> MachineRates(model::Device device,
                                                                   const AttentionShape& shape,
                                                                   ThreadPool* pool);

// Measures and keeps them. path: where, for people; empty: nowhere.
absl::StatusOr<std::shared_ptr<const decoder::Rates>> MeasureMachine(model::Device device,
                                                                     const AttentionShape& shape,
                                                                     ThreadPool* pool,
                                                                     std::string* path = nullptr);

// As a file holds them; InvalidArgument: it is no such text.
std::string RatesToText(const decoder::Rates& rates);
absl::StatusOr<decoder::Rates> RatesFromText(absl::string_view text, const std::string& where);

// What a token's attention of one layer takes in this host's memory, to every row of a zone of so many, or to
// `budget` > 0 of each KV head: over rows that are made up, by what a store in this process answers with. Milliseconds;
// 128 MiB of memory beside the rows. Errors: those of kvstore/.
absl::StatusOr<decoder::TimedLayer> TimeHostLayer(const AttentionShape& shape, int64_t zone_rows,
                                                  int64_t budget, ThreadPool* pool);

}  // namespace carrel::library
