#include "common/thread_pool.h"

#include <linux/futex.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <climits>
#include <exception>
#include <utility>

#include "common/status.h"
#include "common/thrown.h"

namespace carrel {
namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

// Sleeps unless the word is no longer `seen`; may return early.
void FutexWait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void FutexWake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

using Clock = std::chrono::steady_clock;

// How long a worker that finds nothing to do looks on before it sleeps. The loops of a token follow
// each other within some microseconds, now and then within a hundred, and to be woken takes as long.
constexpr std::chrono::microseconds kLookOn(120);
// But where threads are more than cores, who looks on takes the core from who computes. He knows it by
// having been away since the kernel gave the core to another thread, twice within kOften: for kBusy, then,
// all look on no longer than kLookOnBusy. Once tells nothing: any process does that now and then; nor does a
// core that a virtual machine's host took, which no thread here would have had.
constexpr std::chrono::microseconds kAway(500), kLookOnBusy(20);
constexpr std::chrono::milliseconds kOften(10), kBusy(100);

// Of the whole process, in ticks of the clock.
std::atomic<Clock::rep> preempted{0}, busy_until{0};

// Whether the kernel took the core from this thread since it was asked last.
bool WasPreempted() {
  thread_local int64_t before = 0;
  rusage usage{};
  if (getrusage(RUSAGE_THREAD, &usage) != 0) return true;
  return std::exchange(before, usage.ru_nivcsw) < usage.ru_nivcsw;
}

void WasAway(Clock::time_point now) {
  if (!WasPreempted()) return;
  const Clock::rep last = preempted.exchange(now.time_since_epoch().count());
  if ((now - kOften).time_since_epoch().count() > last) return;
  busy_until.store((now + kBusy).time_since_epoch().count(), std::memory_order_relaxed);
}

// Looks on until done() or the time has passed. Without yielding: who yields to a thread that computes
// gets the core back at the next tick of the kernel's clock, milliseconds later.
template <class Done>
void LookOn(const Done& done) {
  if (done()) return;
  Clock::time_point now = Clock::now();
  const bool busy = now.time_since_epoch().count() < busy_until.load(std::memory_order_relaxed);
  const Clock::time_point until = now + (busy ? kLookOnBusy : kLookOn);
  while (!done() && now < until) {
    __builtin_ia32_pause();
    const Clock::time_point before = std::exchange(now, Clock::now());
    if (now - before > kAway) WasAway(now);
  }
}

}  // namespace

// Lives on the stack of ParallelFor's caller, who stays until nobody is inside.
struct ThreadPool::Loop {
  const int64_t count;
  absl::FunctionRef<void(int64_t)> body;
  const Loop* const within = of_this_thread;  // whose unit began it, or null
  std::atomic<bool> thrown_once{false};
  std::exception_ptr thrown;  // by a unit; to be read once nobody is inside

  static thread_local const Loop* of_this_thread;  // whose unit it runs
};

thread_local const ThreadPool::Loop* ThreadPool::Loop::of_this_thread = nullptr;

ThreadPool::ThreadPool(int threads, int64_t queue_limit) : queue_limit_(queue_limit) {
  CARREL_CHECK(threads >= 0 && queue_limit >= 1);
  workers_.reserve(threads);
  try {
    for (int i = 0; i < threads; ++i) workers_.emplace_back([this] { Work(); });
  } catch (...) {  // the system gives no more: those that run must not end the process
    Stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { Stop(); }

void ThreadPool::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  Announce(INT_MAX);
  for (std::thread& worker : workers_) worker.join();
}

bool ThreadPool::TrySubmit(std::function<void()> task) {
  {
    absl::MutexLock lock(&mu_);
    if (stopping_ || workers_.empty() || static_cast<int64_t>(queue_.size()) >= queue_limit_)
      return false;
    queue_.push_back(std::move(task));
    ++tasks_;
  }
  Announce(1);
  return true;
}

// Who goes to sleep counts himself and then looks at the number; here it is the other way around: one of
// both sees the other.
void ThreadPool::Announce(int64_t count) {
  board_.announced.fetch_add(1);
  const int64_t sleeping = board_.sleeping.load();
  if (sleeping == 0 || count <= 0) return;
  // A thread that waits for a loop of loops may be woken for what is none of its business: then all are.
  const bool all = board_.waiting.load() > 0 || count >= sleeping;
  FutexWake(board_.announced, all ? INT_MAX : static_cast<int>(count));
}

void ThreadPool::SleepUnlessAnnounced(uint32_t seen) {
  board_.sleeping.fetch_add(1);
  if (board_.announced.load() == seen) FutexWait(board_.announced, seen);
  board_.sleeping.fetch_sub(1);
}

int64_t ThreadPool::queued() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int64_t>(queue_.size());
}

ThreadPool::Slot* ThreadPool::TakeSlot() {
  uint64_t taken = taken_.load(std::memory_order_relaxed);
  while (~taken != 0) {
    const int free = std::countr_one(taken);
    if (taken_.compare_exchange_weak(taken, taken | uint64_t{1} << free)) {
      return &slots_[static_cast<size_t>(free)];
    }
  }
  return nullptr;
}

void ThreadPool::FreeSlot(Slot& slot) { taken_.fetch_and(~BitOf(slot)); }

// What each thread would find no unit of is not worth joining.
bool ThreadPool::MayJoin(const Slot& slot) {
  const uint32_t inside = slot.inside.load(std::memory_order_relaxed);
  const int64_t count = slot.count.load(std::memory_order_relaxed);
  return (inside & kOpen) != 0 && int64_t{inside & kInside} + 1 < count &&
         slot.next.load(std::memory_order_relaxed) < count;
}

// The loop may have been closed since it was looked at, and another one opened.
bool ThreadPool::Join(Slot& slot) {
  if ((slot.inside.fetch_add(1, std::memory_order_acquire) & kOpen) != 0) return true;
  Leave(slot);
  return false;
}

void ThreadPool::Leave(Slot& slot) {
  const uint32_t before = slot.inside.fetch_sub(1);
  if ((before & kInside) != 1 || (before & kOpen) != 0) return;
  if ((before & kWaited) != 0) FutexWake(slot.inside, 1);
  if ((before & kBoardWaited) != 0) Announce(INT_MAX);
}

void ThreadPool::Unlist(Slot& slot) {
  if ((board_.open.load(std::memory_order_relaxed) & BitOf(slot)) != 0) {
    board_.open.fetch_and(~BitOf(slot));
  }
}

// False if all units have been taken.
bool ThreadPool::RunOne(Slot& slot) {
  Loop& loop = *slot.loop;
  const int64_t i = slot.next.fetch_add(1);
  if (i >= loop.count) return false;
  const Loop* const before = std::exchange(Loop::of_this_thread, &loop);
  try {
    loop.body(i);
  } catch (...) {  // the caller's, who throws it again
    if (!loop.thrown_once.exchange(true)) loop.thrown = std::current_exception();
    slot.next.store(loop.count);  // nobody begins what is left
  }
  Loop::of_this_thread = before;
  return true;
}

void ThreadPool::Drain(Slot& slot) {
  while (RunOne(slot)) {
  }
  Unlist(slot);
}

bool ThreadPool::Done(const Slot& slot) { return (slot.inside.load() & kInside) == 0; }

void ThreadPool::Begin(Slot& slot, Loop& loop) {
  slot.loop = &loop;
  slot.next.store(0, std::memory_order_relaxed);
  slot.count.store(loop.count, std::memory_order_relaxed);
  slot.order.store(board_.order.fetch_add(1, std::memory_order_relaxed), std::memory_order_relaxed);
  slot.inside.fetch_or(kOpen);
  board_.open.fetch_or(BitOf(slot));
  Announce(loop.count - 1);
  Drain(slot);
  slot.inside.fetch_and(~kOpen);
}

// The last units end soon, too soon for a sleep.
void ThreadPool::Wait(Slot& slot) {
  LookOn([&] { return Done(slot); });
  if (Done(slot)) return;
  uint32_t seen = slot.inside.fetch_or(kWaited) | kWaited;
  for (; (seen & kInside) != 0; seen = slot.inside.load()) FutexWait(slot.inside, seen);
  slot.inside.fetch_and(~kWaited);
}

void ThreadPool::ParallelFor(int64_t count, absl::FunctionRef<void(int64_t)> body) {
  Slot* const slot = count <= 1 || workers_.empty() ? nullptr : TakeSlot();
  if (slot == nullptr) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  Loop loop{count, body};
  Begin(*slot, loop);
  Wait(*slot);
  FreeSlot(*slot);
  if (loop.thrown != nullptr) std::rethrow_exception(loop.thrown);
}

ThreadPool::Slot* ThreadPool::JoinWithin(const Loop& loop) {
  for (uint64_t open = board_.open.load(); open != 0; open &= open - 1) {
    Slot& slot = slots_[static_cast<size_t>(std::countr_zero(open))];
    if (!MayJoin(slot) || !Join(slot)) continue;
    for (const Loop* outer = slot.loop->within; outer != nullptr; outer = outer->within) {
      if (outer == &loop) return &slot;
    }
    Leave(slot);
  }
  return nullptr;
}

void ThreadPool::ParallelForOfLoops(int64_t count, absl::FunctionRef<void(int64_t)> body) {
  Slot* const slot = count <= 1 || workers_.empty() ? nullptr : TakeSlot();
  if (slot == nullptr) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  Loop loop{count, body};
  Begin(*slot, loop);
  while (!Done(*slot)) {
    const uint32_t seen = board_.announced.load();
    if (Slot* const other = JoinWithin(loop); other != nullptr) {
      // One unit, and then another look: this thread's own caller waits.
      if (!RunOne(*other)) Unlist(*other);
      Leave(*other);
      continue;
    }
    const auto changed = [&] { return Done(*slot) || board_.announced.load() != seen; };
    LookOn(changed);
    if (changed()) continue;
    board_.waiting.fetch_add(1);
    if ((slot->inside.fetch_or(kBoardWaited) & kInside) != 0) SleepUnlessAnnounced(seen);
    slot->inside.fetch_and(~kBoardWaited);
    board_.waiting.fetch_sub(1);
  }
  FreeSlot(*slot);
  if (loop.thrown != nullptr) std::rethrow_exception(loop.thrown);
}

bool ThreadPool::RunOldest() {
  Slot* oldest = nullptr;
  for (uint64_t open = board_.open.load(); open != 0; open &= open - 1) {
    Slot& slot = slots_[static_cast<size_t>(std::countr_zero(open))];
    if (!MayJoin(slot)) continue;
    if (oldest == nullptr || slot.order.load(std::memory_order_relaxed) <
                                 oldest->order.load(std::memory_order_relaxed)) {
      oldest = &slot;
    }
  }
  if (oldest == nullptr) return false;
  if (Join(*oldest)) {
    Drain(*oldest);
    Leave(*oldest);
  }
  return true;
}

bool ThreadPool::RunTask() {
  if (tasks_.load() == 0) return false;
  std::function<void()> task;
  {
    absl::MutexLock lock(&mu_);
    if (queue_.empty()) return false;
    task = std::move(queue_.front());
    queue_.pop_front();
    --tasks_;
  }
  // Who waits for the task hears of it by what it lets go of.
  CatchThrown("a task of a pool", [&] {
    task();
    return absl::OkStatus();
  }).IgnoreError();
  return true;
}

void ThreadPool::Work() {
  for (;;) {
    const uint32_t seen = board_.announced.load();
    if (RunOldest() || RunTask()) continue;
    if (stopping_.load() && tasks_.load() == 0) return;
    const auto changed = [&] { return board_.announced.load(std::memory_order_relaxed) != seen; };
    LookOn(changed);
    if (!changed()) SleepUnlessAnnounced(seen);
  }
}

}  // namespace carrel
