// What:   when what failed for the moment is tried again: waits that double, drawn at random below their
//         bound (full jitter), so that many who failed at once do not come back at once.
// Edge:   what a server asks for (Retry-After) is waited for at least, within the deadline.
// Threads: one per Retry.
#pragma once

#include <algorithm>
#include <atomic>

#include "absl/random/random.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/steady_time.h"

namespace carrel::kvstore {

struct RetryPolicy {
  int attempts = 10;
  absl::Duration first = absl::Milliseconds(100);  // bound of the first wait
  absl::Duration most = absl::Seconds(10);         // of any
  absl::Duration deadline = absl::Minutes(2);      // from the first attempt on; none begins later
};

class Retry {
 public:
  explicit Retry(const RetryPolicy& policy)
      : policy_(policy), until_(SteadyNow() + policy.deadline) {}

  int attempt() const { return attempt_; }  // 1: the first
  absl::Duration left() const { return until_ - SteadyNow(); }

  // Waits for the next attempt's turn; false: there is none, or it was cancelled meanwhile.
  bool Wait(absl::Duration at_least = absl::ZeroDuration(),
            const std::atomic<bool>* cancelled = nullptr) {
    if (attempt_ >= policy_.attempts) return false;
    absl::Duration bound = policy_.first;
    for (int i = 1; i < attempt_ && bound < policy_.most; ++i) bound *= 2;
    bound = std::min(bound, policy_.most);
    const absl::Duration wait = std::max(at_least, bound * absl::Uniform<double>(bits_, 0.1, 1.0));
    if (wait > left()) return false;
    for (const absl::Time end = SteadyNow() + wait; SteadyNow() < end;) {
      if (cancelled != nullptr && *cancelled) return false;
      absl::SleepFor(std::min(end - SteadyNow(), absl::Milliseconds(100)));
    }
    ++attempt_;
    return true;
  }

 private:
  const RetryPolicy policy_;
  const absl::Time until_;
  int attempt_ = 1;
  absl::BitGen bits_;
};

}  // namespace carrel::kvstore
