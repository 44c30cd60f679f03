// What:    the sessions of a server, so that draining can wait for them and end what is left.
// Threads: any.
#pragma once

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace carrel::kvstore {

class SessionReactor;

class SessionRegistry {
 public:
  // False while draining: the session must end at once.
  bool Add(std::shared_ptr<SessionReactor> session) {
    absl::MutexLock lock(&mu_);
    if (draining_) return false;
    SessionReactor* const key = session.get();
    sessions_.emplace(key, std::move(session));
    return true;
  }
  void Remove(SessionReactor* session) {
    std::shared_ptr<SessionReactor> last;  // destroyed without the lock
    absl::MutexLock lock(&mu_);
    const auto it = sessions_.find(session);
    if (it == sessions_.end()) return;
    last = std::move(it->second);
    sessions_.erase(it);
  }

  // From now on none is added. Returns those that are left at the deadline.
  std::vector<std::shared_ptr<SessionReactor>> Drain(absl::Time deadline) {
    absl::MutexLock lock(&mu_);
    draining_ = true;
    mu_.AwaitWithDeadline(absl::Condition(
                              +[](SessionRegistry* self) ABSL_NO_THREAD_SAFETY_ANALYSIS {
                                return self->sessions_.empty();
                              },
                              this),
                          deadline);
    std::vector<std::shared_ptr<SessionReactor>> left;
    for (const auto& [key, session] : sessions_) left.push_back(session);
    return left;
  }

 private:
  absl::Mutex mu_;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  absl::flat_hash_map<SessionReactor*, std::shared_ptr<SessionReactor>> sessions_
      ABSL_GUARDED_BY(mu_);
};

}  // namespace carrel::kvstore
