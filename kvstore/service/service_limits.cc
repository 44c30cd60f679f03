#include "kvstore/service/service_limits.h"

#include "common/status.h"

namespace carrel::kvstore {

absl::Status ValidateServiceLimits(const ServiceLimits& limits) {
  constexpr int64_t kMi = int64_t{1} << 20;
  const struct {
    const char* name;
    int64_t value, low, high;
  } counts[] = {
      {"max_connections", limits.max_connections, 0, kMi},
      {"max_streams", limits.max_streams, 1, 65536},
      {"max_transfers", limits.max_transfers, 1, 4096},
      {"max_sessions_per_peer", limits.max_sessions_per_peer, 0, kMi},
  };
  for (const auto& count : counts) {
    if (count.value >= count.low && count.value <= count.high) continue;
    return absl::InvalidArgumentError(absl::StrCat("service: ", count.name, "=", count.value,
                                                   " is outside ", count.low, " .. ", count.high));
  }
  const std::pair<const char*, absl::Duration> times[] = {{"open_timeout", limits.open_timeout},
                                                          {"idle_timeout", limits.idle_timeout},
                                                          {"stall_timeout", limits.stall_timeout}};
  for (const auto& [name, value] : times) {
    if (value > absl::ZeroDuration()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("service: ", name, "=", absl::FormatDuration(value), " is not above 0"));
  }
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
