#include "kvstore/engine/work_queue.h"

#include <utility>

#include "common/status.h"

namespace carrel::kvstore {

absl::Status WorkQueue::Submit(std::function<void()> task) {
  if (waiting_.fetch_add(1) >= limit_) {
    waiting_.fetch_sub(1);
    return absl::ResourceExhaustedError(
        absl::StrCat("queue is full: ", limit_, " requests wait (queue_limit=", limit_, ")"));
  }
  const bool accepted = pool_.TrySubmit([this, task = std::move(task)] {
    waiting_.fetch_sub(1);
    task();
  });
  if (accepted) return absl::OkStatus();
  waiting_.fetch_sub(1);
  return absl::UnavailableError("engine is shutting down");
}

void WorkQueue::Continue(std::function<void()> task) {
  // Refused only while the pool is being destroyed, when no session is left to miss it.
  if (!pool_.TrySubmit(std::move(task))) return;
}

}  // namespace carrel::kvstore
