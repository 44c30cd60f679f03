// What:    the engine's threads, with a limit on the requests that wait for one. What an accepted
//          request needs later (the next part of its reply) is never refused: it is bounded by the
//          requests in flight.
// Errors:  ResourceExhausted names the limit.
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "common/thread_pool.h"

namespace carrel::kvstore {

class WorkQueue {
 public:
  WorkQueue(int threads, int64_t limit) : limit_(limit), pool_(threads) {}

  absl::Status Submit(std::function<void()> task);
  void Continue(std::function<void()> task);
  void ParallelFor(int64_t count, absl::FunctionRef<void(int64_t)> body) {
    pool_.ParallelFor(count, body);
  }
  int64_t waiting() const { return waiting_.load(std::memory_order_relaxed); }

 private:
  const int64_t limit_;
  std::atomic<int64_t> waiting_{0};
  ThreadPool pool_;  // last: joined first
};

}  // namespace carrel::kvstore
