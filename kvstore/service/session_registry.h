// What:    the sessions of a server from their start on: how many there may be, which of them ran out
//          of time, and draining, which waits for them and ends what is left.
// Threads: any.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kvstore/service/service_limits.h"

namespace carrel::kvstore {

class SessionReactor;

// gRPC's name of a peer without its port: all connections of one host.
std::string HostOfPeer(absl::string_view peer);

// How many were ended, and why.
struct EndedSessions {
  std::atomic<int64_t> not_opened{0}, idle{0}, stalled{0}, withdrawn{0};
};

class SessionRegistry {
 public:
  // max_sessions: of the engine, too.
  SessionRegistry(const ServiceLimits& limits, int64_t max_sessions)
      : limits_(limits), max_sessions_(max_sessions) {}

  // Unavailable while draining; ResourceExhausted names the limit. The session must then end at once.
  absl::Status Add(std::shared_ptr<SessionReactor> session, const std::string& host);
  void Remove(SessionReactor* session);

  // Ends those that ran out of time; call it several times per second.
  void EndOverdue();
  // Ends those whose callers may not have them any more; call it about every second.
  void EndWithdrawn();

  // From now on none is added. Returns those that are left after `wait`, or at HurryUp.
  std::vector<std::shared_ptr<SessionReactor>> Drain(absl::Duration wait);
  void HurryUp() { hurry_.store(true); }

  // Sets the fields of sessions.
  void AddTo(ServiceStatistics* statistics) const;

 private:
  std::vector<std::shared_ptr<SessionReactor>> All() const;

  struct Entry {
    std::shared_ptr<SessionReactor> session;
    std::string host;
  };

  const ServiceLimits limits_;
  const int64_t max_sessions_;
  std::atomic<bool> hurry_{false};
  std::atomic<int64_t> refused_{0};
  EndedSessions ended_;
  mutable absl::Mutex mu_;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  absl::flat_hash_map<SessionReactor*, Entry> sessions_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, int64_t> of_host_ ABSL_GUARDED_BY(mu_);
};

}  // namespace carrel::kvstore
