#include "kvstore/engine/engine_config.h"

#include "common/status.h"

namespace carrel::kvstore {

absl::Status ValidateEngineConfig(const EngineConfig& config) {
  constexpr int64_t kKi = 1024, kMi = kKi * kKi, kMaxBytes = int64_t{1} << 50;
  const struct {
    const char* name;
    int64_t value, low, high;
  } fields[] = {
      {"memory_budget_bytes", config.memory_budget_bytes == 0 ? kMi : config.memory_budget_bytes,
       kMi, kMaxBytes},
      {"request_budget_bytes",
       config.request_budget_bytes == 0 ? 16 * kMi : config.request_budget_bytes, 16 * kMi,
       kMaxBytes},
      {"search_threads", config.search_threads, 0, 1024},
      {"queue_limit", config.queue_limit, 1, kMi},
      {"max_open_contexts", config.max_open_contexts, 1, 4096},
      {"max_sessions", config.max_sessions, 1, kMi},
      {"max_top_k", config.max_top_k, 1, kMi},
      {"max_query_tokens", config.max_query_tokens, 1, 4096},
      {"max_in_flight", config.max_in_flight, 1, 65536},
      {"max_fetch_rows", config.max_fetch_rows, 1, 16 * kMi},
      {"max_result_bytes", config.max_result_bytes, kMi, kMaxBytes},
      {"max_candidate_sets", config.max_candidate_sets, 1, 1024},
      {"scrub_bytes_per_s", config.scrub_bytes_per_s, 0, int64_t{1} << 34},
      {"import_age_s", config.import_age_s, 0, int64_t{10} * 366 * 86400},
      {"reply_part_bytes", config.reply_part_bytes, 4 * kKi, 32 * kMi},
  };
  for (const auto& field : fields) {
    if (field.value >= field.low && field.value <= field.high) continue;
    return absl::InvalidArgumentError(absl::StrCat("engine: ", field.name, "=", field.value,
                                                   " is outside ", field.low, " .. ", field.high));
  }
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
