// What:   the HTTP port that Prometheus scrapes: GET /metrics. Nothing else is served, and nothing is
//         read but a request line and headers of at most 8 KiB within 5 s; at most 16 connections at
//         a time, one request each.
// Source: Boost.Beast (decision 041).
// Errors: of Start: InvalidArgument an address; FailedPrecondition one that cannot be bound (names
//         it and why).
// Threads: any; `text` is called on the listener's own thread.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace carrel::kvstore {

class MetricsListener {
 public:
  // "HOST:PORT", HOST a number ("127.0.0.1", "[::]"), port 0 any free one; or "PORT", on loopback.
  static absl::StatusOr<std::unique_ptr<MetricsListener>> Start(const std::string& address,
                                                                std::function<std::string()> text);
  virtual ~MetricsListener() = default;            // stops; requests in flight are cut
  virtual const std::string& address() const = 0;  // "127.0.0.1:9464", with the port that was bound
};

}  // namespace carrel::kvstore
