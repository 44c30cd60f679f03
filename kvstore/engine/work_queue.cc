#include "kvstore/engine/work_queue.h"

#include <utility>

#include "common/status.h"
#include "kvstore/engine/request_metrics.h"

namespace carrel::kvstore {

absl::Status WorkQueue::Submit(const void* tenant, const void* owner, std::function<void()> task) {
  if (waiting_.fetch_add(1) >= limit_) {
    waiting_.fetch_sub(1);
    refused_.fetch_add(1);
    CountRefusal("queue");
    return absl::ResourceExhaustedError(
        absl::StrCat("queue is full: ", limit_, " requests wait (queue_limit=", limit_, ")"));
  }
  // Under the lock, so that a task is listed exactly if a thread will come for one.
  absl::MutexLock lock(&mu_);
  if (!pool_.TrySubmit([this] { RunNext(); })) {
    waiting_.fetch_sub(1);
    return absl::UnavailableError("engine is shutting down");
  }
  Owners& owners = tenants_[tenant];
  if (owners.turns.empty()) turns_.push_back(tenant);
  std::deque<std::function<void()>>& mine = owners.tasks[owner];
  if (mine.empty()) owners.turns.push_back(owner);
  mine.push_back(std::move(task));
  return absl::OkStatus();
}

void WorkQueue::RunNext() {
  std::function<void()> task;
  {
    absl::MutexLock lock(&mu_);
    const void* tenant = turns_.front();
    turns_.pop_front();
    Owners& owners = tenants_[tenant];
    const void* owner = owners.turns.front();
    owners.turns.pop_front();
    const auto mine = owners.tasks.find(owner);
    task = std::move(mine->second.front());
    mine->second.pop_front();
    if (mine->second.empty()) {
      owners.tasks.erase(mine);
    } else {
      owners.turns.push_back(owner);
    }
    if (owners.turns.empty()) {
      tenants_.erase(tenant);
    } else {
      turns_.push_back(tenant);
    }
  }
  waiting_.fetch_sub(1);
  task();
}

void WorkQueue::Continue(std::function<void()> task) {
  // Refused only while the pool is being destroyed, when no session is left to miss it.
  if (!pool_.TrySubmit(std::move(task))) return;
}

}  // namespace carrel::kvstore
