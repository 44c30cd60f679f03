// What: what clients may take of a server, in connections, streams and time. Limits of the work that
//       they ask for are the engine's (EngineConfig).
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace carrel::kvstore {

struct ServiceLimits {
  // Connections open at a time. 0: kMostConnections, or what the limit of descriptors allows if
  // that is less. 1 .. 2^20.
  int64_t max_connections = 0;
  // Calls of one connection at a time: sessions, too. 1 .. 65536. Default: a host's decoders.
  int32_t max_streams = 128;
  // Sessions of one peer, from their start on: of one IP address, or all of a Unix socket.
  // 0: as many as EngineConfig.max_sessions. 0 .. 2^20.
  int64_t max_sessions_per_peer = 0;
  // Exports and imports at a time. 1 .. 4096. Default: many times what a disk serves well.
  int64_t max_transfers = 32;
  // From the start of a session until its Open request is there. > 0.
  absl::Duration open_timeout = absl::Seconds(10);
  // A session that asks for nothing, with nothing on its way to it; an import of which nothing
  // comes. > 0. Default: none.
  absl::Duration idle_timeout = absl::InfiniteDuration();
  // A session or an export whose client takes nothing of what is sent. > 0. Default: longer than a
  // decoder that computes a block of prompt tokens on a slow machine.
  absl::Duration stall_timeout = absl::Seconds(60);
};

inline constexpr int64_t kMostConnections = 4096;

// InvalidArgument names field, value and bounds.
absl::Status ValidateServiceLimits(const ServiceLimits& limits);

// What a server did and holds.
struct ServiceStatistics {
  int64_t connections = 0;  // open
  int64_t connections_accepted = 0;
  int64_t connections_refused = 0;  // max_connections, or no descriptor
  int64_t connections_silent = 0;   // closed, as their clients said nothing for 10 s
  int64_t max_connections = 0;
  int64_t max_descriptors = 0;      // the process may have
  int64_t sessions = 0;             // started, opened or not
  int64_t sessions_refused = 0;     // max_sessions, max_sessions_per_peer, draining
  int64_t sessions_not_opened = 0;  // ended by open_timeout
  int64_t sessions_idle = 0;        // ended by idle_timeout
  int64_t sessions_stalled = 0;     // ended by stall_timeout
  int64_t transfers = 0;            // exports and imports that go on
  int64_t sessions_withdrawn = 0;   // ended while they were quiet, as their keys had lost them
};

}  // namespace carrel::kvstore
