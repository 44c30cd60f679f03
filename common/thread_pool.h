// What:   a fixed pool of threads with a bounded queue, and a parallel loop on it.
// Threads: every method may be called from any thread.
//
// Invariants
//   1. At most `queue_limit` submitted tasks wait; TrySubmit refuses further ones and runs nothing.
//   2. ParallelFor's caller works too, so a loop started inside a task cannot deadlock, whatever
//      the pool's load.
//   3. The destructor runs every task that was accepted, then joins.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace carrel {

class ThreadPool {
 public:
  // threads >= 0 workers. ParallelFor over T cores wants T - 1 of them: the caller is one more.
  // TrySubmit needs at least one. std::system_error where the system gives fewer.
  explicit ThreadPool(int threads, int64_t queue_limit = INT64_MAX);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // False if the queue is full or the pool is shutting down; the task is then not run.
  [[nodiscard]] bool TrySubmit(std::function<void()> task);

  // Runs body(i) for each i in [0, count), in no order, on this thread and idle workers; returns when all
  // are done. What a unit throws is thrown here; others may not have begun then. The unit is one i: some
  // 5 us or more, and small beside the whole, since at the end all wait for the last one.
  void ParallelFor(int64_t count, absl::FunctionRef<void(int64_t)> body);

  // The same for units that are long and have loops of their own, as contexts have heads: who is done
  // takes part in those of the others until all are. So a unit's loops may run on a thread that waits
  // here: it must not have anything in use that belongs to the thread (thread_local) and to those loops.
  void ParallelForOfLoops(int64_t count, absl::FunctionRef<void(int64_t)> body);

  int threads() const { return static_cast<int>(workers_.size()); }
  int64_t queued() const;

 private:
  struct Loop;
  // Lists the loop, and takes its units with others until none is left to begin.
  void Begin(Loop& loop);
  // Nobody joins a loop that is no longer listed.
  void Unlist(Loop& loop) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // One that a unit of `loop`, or a unit of a loop of it, has listed; null if there is none.
  Loop* ListedWithin(const Loop& loop) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Work();
  void Stop();  // once the queue is empty
  // Notes under mu_ that there is work for up to `count` threads; Wake, without it, wakes as many of
  // those that sleep.
  int64_t Announce(int64_t count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Wake(int64_t count);

  const int64_t queue_limit_;
  mutable absl::Mutex mu_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mu_);
  std::deque<Loop*> loops_ ABSL_GUARDED_BY(mu_);  // loops that may still have unclaimed indices
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int64_t sleeping_ ABSL_GUARDED_BY(mu_) = 0;  // workers
  // Changes with every announcement; what workers sleep on. Waiting on mu_ itself would wake them
  // one after another, each by the one before it.
  std::atomic<uint32_t> announced_{0};
  std::vector<std::thread> workers_;
};

}  // namespace carrel
