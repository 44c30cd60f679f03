// What:    the engine's threads, shared in turns of two levels: tenants by turns, and the sessions of
//          a tenant by turns, so that neither a session with many requests nor a tenant with many
//          sessions holds up the others.
//          A limit on the requests that wait. What an accepted request needs later (the next part
//          of its reply) is never refused: it is bounded by the requests in flight.
// Errors:  ResourceExhausted names the limit.
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/thread_pool.h"

namespace carrel::kvstore {

class WorkQueue {
 public:
  WorkQueue(int threads, int64_t limit) : limit_(limit), pool_(threads) {}

  // Whose turn it takes: any address that stands for a tenant (null: who has none) and for a
  // session of his.
  absl::Status Submit(const void* tenant, const void* owner, std::function<void()> task);
  void Continue(std::function<void()> task);
  ThreadPool& pool() { return pool_; }  // for loops inside a task
  int64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  int64_t waiting() const { return waiting_.load(std::memory_order_relaxed); }

 private:
  void RunNext();

  const int64_t limit_;
  std::atomic<int64_t> waiting_{0}, refused_{0};
  absl::Mutex mu_;
  // The tasks of each owner of a tenant that has some, in order, and the owners in the order of
  // their turns.
  struct Owners {
    absl::flat_hash_map<const void*, std::deque<std::function<void()>>> tasks;
    std::deque<const void*> turns;
  };
  // Those tenants that have some, and their turns.
  absl::flat_hash_map<const void*, Owners> tenants_ ABSL_GUARDED_BY(mu_);
  std::deque<const void*> turns_ ABSL_GUARDED_BY(mu_);
  ThreadPool pool_;  // last: joined first
};

}  // namespace carrel::kvstore
