// What:   threads that do what may block (reading a request, rendering a chat, tokenizing, asking the store), by turns
//         (turn_queue.h): many long requests of one key do not delay those of others. One thread per place, reserved
//         places included.
// Errors: ResourceExhausted as turn_queue.h. Of the constructor: std::system_error where the system gives fewer threads.
// Edge:   what was accepted is done before the destructor returns; what a task throws is its own end.
// Threads: any.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "serving/turn_queue.h"

namespace carrel::serving {

// Of a pool that may end: runs the task soon, on a thread that may block; false: it has ended.
using RunLater = std::function<bool(Turn turn, std::function<void()> task)>;

class TurnPool {
 public:
  explicit TurnPool(const TurnQueueConfig& config);
  ~TurnPool();
  TurnPool(const TurnPool&) = delete;
  TurnPool& operator=(const TurnPool&) = delete;

  absl::Status Submit(Turn turn, std::function<void()> task);
  // What a request that was accepted needs later: it is not refused, for requests are bounded.
  void Continue(Turn turn, std::function<void()> task);

 private:
  struct Task {
    Turn turn;
    std::function<void()> run;
  };

  void Work();
  void Stop();

  absl::Mutex mu_;
  absl::CondVar changed_;  // a task came, a place is free, or it ends
  TurnQueue<Task> queue_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace carrel::serving
