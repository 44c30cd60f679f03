// What:   a fixed pool of threads with a bounded queue, and a parallel loop on it.
// Threads: every method may be called from any thread.
//
// Invariants
//   1. At most `queue_limit` submitted tasks wait; TrySubmit refuses further ones and runs nothing.
//   2. ParallelFor's caller works too, so a loop started inside a task cannot deadlock, whatever
//      the pool's load.
//   3. The destructor runs every task that was accepted, then joins.
//
// Cost: a loop takes no lock. Who takes part touches three lines of memory that others touch too: some
// microseconds for 16 threads that look on.
#pragma once

#include <array>
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
  // Where others find a loop. It outlives the loop: who comes late may still look at it.
  struct alignas(64) Slot {
    std::atomic<uint32_t> inside{0};  // how many others, kOpen, kWaited, kBoardWaited
    std::atomic<uint64_t> order{0};   // the older loop has the lower one
    std::atomic<int64_t> count{0};
    Loop* loop = nullptr;                      // while it is open, or others are inside
    alignas(64) std::atomic<int64_t> next{0};  // the unit that nobody has begun
  };
  // What all look at, on a line of its own.
  struct alignas(64) Board {
    std::atomic<uint64_t> open{0};       // a bit for each slot whose loop may have units left
    std::atomic<uint32_t> announced{0};  // changes with every loop and task; what workers sleep on
    std::atomic<int32_t> sleeping{0};    // workers, and who waits for a loop of loops
    std::atomic<int32_t> waiting{0};     // of these the latter
    std::atomic<uint64_t> order{0};
  };
  static constexpr uint32_t kOpen = 1u << 31, kWaited = 1u << 30, kBoardWaited = 1u << 29;
  static constexpr uint32_t kInside = kBoardWaited - 1;
  static constexpr int kSlots = 64;

  Slot* TakeSlot();  // null if all are taken
  void FreeSlot(Slot& slot);
  uint64_t BitOf(const Slot& slot) const { return uint64_t{1} << (&slot - slots_.data()); }
  // Shows the loop, and takes its units with others until none is left to begin.
  void Begin(Slot& slot, Loop& loop);
  static bool MayJoin(const Slot& slot);
  // Who joined leaves; until then slot.loop stays.
  bool Join(Slot& slot);
  void Leave(Slot& slot);
  // Nobody looks for units there any more; the caller is inside, or the loop is its own.
  void Unlist(Slot& slot);
  static bool RunOne(Slot& slot);
  void Drain(Slot& slot);
  static bool Done(const Slot& slot);
  static void Wait(Slot& slot);
  // Joined: that of a loop which a unit of `loop`, or a unit of a loop of it, began; or null.
  Slot* JoinWithin(const Loop& loop);
  bool RunOldest();  // the loop's units, until none is left; false if there is none
  bool RunTask();
  void Work();
  void Stop();  // once the queue is empty
  // There is work for up to `count` threads: wakes as many of those that sleep.
  void Announce(int64_t count);
  void SleepUnlessAnnounced(uint32_t seen);

  const int64_t queue_limit_;
  Board board_;
  std::array<Slot, kSlots> slots_;
  alignas(64) std::atomic<uint64_t> taken_{0};  // a bit for each slot
  std::atomic<int64_t> tasks_{0};               // in queue_
  std::atomic<bool> stopping_{false};
  mutable absl::Mutex mu_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> workers_;
};

}  // namespace carrel
