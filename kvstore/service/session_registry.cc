#include "kvstore/service/session_registry.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "kvstore/service/session_reactor.h"

namespace carrel::kvstore {

std::string HostOfPeer(absl::string_view peer) {
  // "ipv4:1.2.3.4:567", "ipv6:%5B::1%5D:567"; the path after "unix:" is the server's own.
  if (!absl::StartsWith(peer, "ipv4:") && !absl::StartsWith(peer, "ipv6:")) {
    return std::string(peer.substr(0, peer.find(':')));
  }
  return std::string(peer.substr(0, peer.rfind(':')));
}

absl::Status SessionRegistry::Add(std::shared_ptr<SessionReactor> session,
                                  const std::string& host) {
  absl::MutexLock lock(&mu_);
  const auto refuse = [&](const absl::Status& status) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    return status;
  };
  if (draining_) return refuse(absl::UnavailableError("server is draining: no new sessions"));
  if (static_cast<int64_t>(sessions_.size()) >= max_sessions_) {
    return refuse(absl::ResourceExhaustedError(absl::StrCat(
        "session: ", sessions_.size(), " are open (max_sessions=", max_sessions_, ")")));
  }
  int64_t& of_host = of_host_[host];
  if (limits_.max_sessions_per_peer > 0 && of_host >= limits_.max_sessions_per_peer) {
    return refuse(absl::ResourceExhaustedError(
        absl::StrCat("session: ", of_host, " of ", host,
                     " are open (max_sessions_per_peer=", limits_.max_sessions_per_peer, ")")));
  }
  ++of_host;
  SessionReactor* const key = session.get();
  sessions_.emplace(key, Entry{std::move(session), host});
  return absl::OkStatus();
}

void SessionRegistry::Remove(SessionReactor* session) {
  Entry last;  // destroyed without the lock
  absl::MutexLock lock(&mu_);
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return;
  last = std::move(it->second);
  sessions_.erase(it);
  const auto of_host = of_host_.find(last.host);
  if (--of_host->second == 0) of_host_.erase(of_host);
}

std::vector<std::shared_ptr<SessionReactor>> SessionRegistry::All() const {
  std::vector<std::shared_ptr<SessionReactor>> all;
  absl::MutexLock lock(&mu_);
  all.reserve(sessions_.size());
  for (const auto& [key, entry] : sessions_) all.push_back(entry.session);
  return all;
}

void SessionRegistry::EndWithdrawn() {
  for (const std::shared_ptr<SessionReactor>& session : All()) {
    session->EndIfWithdrawn(ended_);
  }
}

void SessionRegistry::EndOverdue() {
  const auto now = std::chrono::steady_clock::now();
  for (const std::shared_ptr<SessionReactor>& session : All()) {
    session->EndIfOverdue(now, limits_, ended_);
  }
}

std::vector<std::shared_ptr<SessionReactor>> SessionRegistry::Drain(absl::Duration wait) {
  const auto start = std::chrono::steady_clock::now();
  {
    absl::MutexLock lock(&mu_);
    draining_ = true;
  }
  // Looked at again and again: absl's waits end by the wall clock, which may be set meanwhile.
  for (;; absl::SleepFor(absl::Milliseconds(5))) {
    absl::MutexLock lock(&mu_);
    const auto waited = absl::FromChrono(std::chrono::steady_clock::now() - start);
    if (!sessions_.empty() && waited < wait && !hurry_.load()) continue;
    std::vector<std::shared_ptr<SessionReactor>> left;
    for (const auto& [key, entry] : sessions_) left.push_back(entry.session);
    return left;
  }
}

void SessionRegistry::AddTo(ServiceStatistics* statistics) const {
  statistics->sessions_refused = refused_.load(std::memory_order_relaxed);
  statistics->sessions_not_opened = ended_.not_opened;
  statistics->sessions_idle = ended_.idle;
  statistics->sessions_stalled = ended_.stalled;
  statistics->sessions_withdrawn = ended_.withdrawn;
  absl::MutexLock lock(&mu_);
  statistics->sessions = static_cast<int64_t>(sessions_.size());
}

}  // namespace carrel::kvstore
