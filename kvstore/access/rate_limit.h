// What:   a bound on something per second, with one second's worth to spend at once.
// Edge:   rate 0: no bound. A clock that goes back costs what has been saved, no more.
// Threads: any.
#pragma once

#include <algorithm>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace carrel::kvstore {

class RateLimit {
 public:
  void SetRate(double per_s) {
    absl::MutexLock lock(&mu_);
    if (per_s_ == 0) saved_ = per_s;
    per_s_ = per_s;
    saved_ = std::min(saved_, per_s_);
  }

  // What is spent is spent, even if there was less: returns how long to wait until it is paid back
  // (zero: go on).
  absl::Duration Spend(double amount, absl::Time now) {
    absl::MutexLock lock(&mu_);
    if (per_s_ == 0) return absl::ZeroDuration();
    const double passed_s = std::max(0.0, absl::ToDoubleSeconds(now - last_));
    last_ = now;
    saved_ = std::min(per_s_, saved_ + passed_s * per_s_) - amount;
    return saved_ >= 0 ? absl::ZeroDuration() : absl::Seconds(-saved_ / per_s_);
  }

 private:
  absl::Mutex mu_;
  double per_s_ ABSL_GUARDED_BY(mu_) = 0;
  double saved_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time last_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace carrel::kvstore
