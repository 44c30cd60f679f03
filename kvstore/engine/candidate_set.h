// What:   the rows that a speculative query found, for the true query that names it. It may be
//         asked for before it is there.
// Threads: any. Set is called exactly once; what it set is constant afterwards.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/byte_budget.h"
#include "common/ids.h"
#include "kvstore/engine/zone_rest.h"

namespace carrel::kvstore {

// Of one token and KV head.
struct CandidateIds {
  std::vector<Position> ids;  // ascending
  ZoneRest rest;              // of the zone less these, around the query that found them
};

class CandidateSet {
 public:
  // charge: of these bytes.
  CandidateSet(Layer layer, int64_t tokens, int64_t bytes, ByteBudget::Charge charge)
      : layer(layer), tokens(tokens), bytes(bytes), charge_(std::move(charge)) {}

  const Layer layer;
  const int64_t tokens;
  const int64_t bytes;  // at most, of the candidates

  // found [tokens, kv_heads]; empty if status is an error. Runs the waiting callbacks, on this thread.
  void Set(absl::Status status, std::vector<CandidateIds> found) {
    std::vector<std::function<void()>> waiters;
    {
      absl::MutexLock lock(&mu_);
      status_ = std::move(status);
      found_ = std::move(found);
      ready_ = true;
      waiters.swap(waiters_);
    }
    for (auto& run : waiters) run();
  }

  bool ready() {
    absl::MutexLock lock(&mu_);
    return ready_;
  }
  // Runs it now if the set is there, else when it is.
  void WhenReady(std::function<void()> run) {
    {
      absl::MutexLock lock(&mu_);
      if (!ready_) {
        waiters_.push_back(std::move(run));
        return;
      }
    }
    run();
  }

  // After it is ready.
  const absl::Status& status() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return status_; }
  const CandidateIds& of(size_t unit) const ABSL_NO_THREAD_SAFETY_ANALYSIS { return found_[unit]; }

 private:
  const ByteBudget::Charge charge_;
  absl::Mutex mu_;
  bool ready_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::vector<CandidateIds> found_ ABSL_GUARDED_BY(mu_);
  std::vector<std::function<void()>> waiters_ ABSL_GUARDED_BY(mu_);
};

}  // namespace carrel::kvstore
