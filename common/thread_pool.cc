#include "common/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "common/status.h"

namespace carrel {

// Lives on the stack of ParallelFor's caller. A worker joins (active_ + 1) under mu_ while the loop
// is listed, so that once the caller has unlisted the loop and seen active_ == 0 nobody can touch
// it any more.
struct ThreadPool::Loop {
  const int64_t count;
  absl::FunctionRef<void(int64_t)> body;
  std::atomic<int64_t> next{0};
  int active = 0;  // workers inside; guarded by mu_

  void Drain() {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) body(i);
  }
};

ThreadPool::ThreadPool(int threads, int64_t queue_limit) : queue_limit_(queue_limit) {
  CARREL_CHECK(threads >= 0 && queue_limit >= 1);
  workers_.reserve(threads);
  for (int i = 0; i < threads; ++i) workers_.emplace_back([this] { Work(); });
}

ThreadPool::~ThreadPool() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& worker : workers_) worker.join();
}

bool ThreadPool::TrySubmit(std::function<void()> task) {
  absl::MutexLock lock(&mu_);
  if (stopping_ || workers_.empty() || static_cast<int64_t>(queue_.size()) >= queue_limit_)
    return false;
  queue_.push_back(std::move(task));
  return true;
}

int64_t ThreadPool::queued() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int64_t>(queue_.size());
}

void ThreadPool::ParallelFor(int64_t count, absl::FunctionRef<void(int64_t)> body) {
  if (count <= 1 || workers_.empty()) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  Loop loop{count, body};
  {
    absl::MutexLock lock(&mu_);
    loops_.push_back(&loop);
  }
  loop.Drain();
  absl::MutexLock lock(&mu_);
  loops_.erase(std::remove(loops_.begin(), loops_.end(), &loop), loops_.end());
  mu_.Await(absl::Condition(
      +[](Loop* l) { return l->active == 0; }, &loop));
}

void ThreadPool::Work() {
  mu_.Lock();
  for (;;) {
    mu_.Await(absl::Condition(
        +[](ThreadPool* pool) ABSL_NO_THREAD_SAFETY_ANALYSIS {
          return pool->stopping_ || !pool->queue_.empty() || !pool->loops_.empty();
        },
        this));
    if (!loops_.empty()) {
      // Oldest loop first; a drained loop is unlisted here so that nobody spins on it.
      Loop* loop = loops_.front();
      ++loop->active;
      mu_.Unlock();
      loop->Drain();
      mu_.Lock();
      loops_.erase(std::remove(loops_.begin(), loops_.end(), loop), loops_.end());
      --loop->active;
    } else if (!queue_.empty()) {
      std::function<void()> task = std::move(queue_.front());
      queue_.pop_front();
      mu_.Unlock();
      task();
      task = nullptr;
      mu_.Lock();
    } else {  // stopping_
      break;
    }
  }
  mu_.Unlock();
}

}  // namespace carrel
