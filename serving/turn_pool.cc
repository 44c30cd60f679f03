#include "serving/turn_pool.h"

#include <optional>
#include <utility>

#include "common/status.h"
#include "common/thrown.h"

namespace carrel::serving {

TurnPool::TurnPool(const TurnQueueConfig& config) : queue_(config) {
  int64_t threads = 0;
  {
    absl::MutexLock lock(&mu_);
    threads = queue_.most_places();
  }
  try {
    for (int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
  } catch (...) {  // the system gives no more: those that run must not end the process
    Stop();
    throw;
  }
}

TurnPool::~TurnPool() { Stop(); }

void TurnPool::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::Status TurnPool::Submit(Turn turn, std::function<void()> task) {
  absl::MutexLock lock(&mu_);
  RETURN_IF_ERROR(queue_.Push({std::move(turn), std::move(task)}));
  changed_.Signal();
  return absl::OkStatus();
}

void TurnPool::Continue(Turn turn, std::function<void()> task) {
  absl::MutexLock lock(&mu_);
  queue_.PushAnyway({std::move(turn), std::move(task)});
  changed_.Signal();
}

void TurnPool::Work() {
  mu_.Lock();
  while (!stopping_ || queue_.size() > 0) {
    std::optional<Task> task = queue_.Take();
    if (!task.has_value()) {
      changed_.Wait(&mu_);
      continue;
    }
    mu_.Unlock();
    CatchThrown("a request", [&] {
      task->run();
      return absl::OkStatus();
    }).IgnoreError();
    task->run = nullptr;  // who waits for it hears of it by what it lets go of
    mu_.Lock();
    queue_.GiveBack(task->turn);
    changed_.SignalAll();  // those in reserve wait for places of their own
  }
  mu_.Unlock();
}

}  // namespace carrel::serving
