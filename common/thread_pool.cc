#include "common/thread_pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
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
// having been away: for so long, then, he looks on no longer than this.
constexpr std::chrono::microseconds kAway(500), kLookOnBusy(20);
constexpr std::chrono::milliseconds kBusy(400);

std::atomic<Clock::rep> busy_until{0};  // of the whole process, in ticks of the clock

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
    if (now - before > kAway) {
      busy_until.store((now + kBusy).time_since_epoch().count(), std::memory_order_relaxed);
    }
  }
}

}  // namespace

// Lives on the stack of ParallelFor's caller. A worker joins (active_ + 1) under mu_ while the loop
// is listed, so that once the caller has unlisted the loop and seen active_ == 0 nobody can touch
// it any more.
struct ThreadPool::Loop {
  const int64_t count;
  absl::FunctionRef<void(int64_t)> body;
  const Loop* const within = of_this_thread;  // whose unit began it, or null
  std::atomic<int64_t> next{0};
  std::atomic<int> active{0};  // others inside; changed under mu_
  std::atomic<bool> thrown_once{false};
  std::exception_ptr thrown;  // by a unit; to be read once nobody is inside

  // False if all units have been taken.
  bool RunOne() {
    const int64_t i = next.fetch_add(1);
    if (i >= count) return false;
    const Loop* const before = std::exchange(of_this_thread, this);
    try {
      body(i);
    } catch (...) {  // the caller's, who throws it again
      if (!thrown_once.exchange(true)) thrown = std::current_exception();
      next.store(count);  // nobody begins what is left
    }
    of_this_thread = before;
    return true;
  }
  void Drain() {
    while (RunOne()) {
    }
  }
  bool Done() const { return active.load(std::memory_order_acquire) == 0; }

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
    Announce(0);
  }
  Wake(INT_MAX);
  for (std::thread& worker : workers_) worker.join();
}

bool ThreadPool::TrySubmit(std::function<void()> task) {
  int64_t wake;
  {
    absl::MutexLock lock(&mu_);
    if (stopping_ || workers_.empty() || static_cast<int64_t>(queue_.size()) >= queue_limit_)
      return false;
    queue_.push_back(std::move(task));
    wake = Announce(1);
  }
  Wake(wake);
  return true;
}

int64_t ThreadPool::Announce(int64_t count) {
  announced_.fetch_add(1, std::memory_order_relaxed);
  return std::min(count, sleeping_);
}

void ThreadPool::Wake(int64_t count) {
  if (count > 0) FutexWake(announced_, static_cast<int>(count));
}

int64_t ThreadPool::queued() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int64_t>(queue_.size());
}

void ThreadPool::Unlist(Loop& loop) {
  loops_.erase(std::remove(loops_.begin(), loops_.end(), &loop), loops_.end());
}

void ThreadPool::Begin(Loop& loop) {
  int64_t wake;
  {
    absl::MutexLock lock(&mu_);
    loops_.push_back(&loop);
    wake = Announce(loop.count - 1);
  }
  Wake(wake);
  loop.Drain();
  absl::MutexLock lock(&mu_);
  Unlist(loop);
}

void ThreadPool::ParallelFor(int64_t count, absl::FunctionRef<void(int64_t)> body) {
  if (count <= 1 || workers_.empty()) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  Loop loop{count, body};
  Begin(loop);
  // The last units end soon, too soon for a sleep.
  LookOn([&] { return loop.Done(); });
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(
      +[](Loop* l) { return l->Done(); }, &loop));
  if (loop.thrown != nullptr) std::rethrow_exception(loop.thrown);
}

ThreadPool::Loop* ThreadPool::ListedWithin(const Loop& loop) {
  for (Loop* const listed : loops_) {
    for (const Loop* outer = listed->within; outer != nullptr; outer = outer->within) {
      if (outer == &loop) return listed;
    }
  }
  return nullptr;
}

void ThreadPool::ParallelForOfLoops(int64_t count, absl::FunctionRef<void(int64_t)> body) {
  if (count <= 1 || workers_.empty()) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  Loop loop{count, body};
  Begin(loop);
  absl::MutexLock lock(&mu_);
  while (!loop.Done()) {
    Loop* const other = ListedWithin(loop);
    if (other == nullptr) {
      const uint32_t seen = announced_.load(std::memory_order_relaxed);
      mu_.Unlock();
      LookOn([&] { return loop.Done() || announced_.load(std::memory_order_relaxed) != seen; });
      mu_.Lock();
      const auto more = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
        return loop.Done() || ListedWithin(loop) != nullptr;
      };
      mu_.Await(absl::Condition(&more));
      continue;
    }
    // One unit, and then another look: this thread's own caller waits.
    other->active.fetch_add(1, std::memory_order_relaxed);
    mu_.Unlock();
    const bool ran = other->RunOne();
    mu_.Lock();
    if (!ran) Unlist(*other);
    other->active.fetch_sub(1, std::memory_order_release);
  }
  if (loop.thrown != nullptr) std::rethrow_exception(loop.thrown);
}

void ThreadPool::Work() {
  uint32_t seen = 0;
  bool looked_on = false;  // since `seen` was read
  mu_.Lock();
  for (;;) {
    if (!loops_.empty()) {
      // Oldest loop first; a drained loop is unlisted here so that nobody spins on it.
      Loop* loop = loops_.front();
      loop->active.fetch_add(1, std::memory_order_relaxed);
      mu_.Unlock();
      loop->Drain();
      mu_.Lock();
      Unlist(*loop);
      loop->active.fetch_sub(1, std::memory_order_release);
    } else if (!queue_.empty()) {
      std::function<void()> task = std::move(queue_.front());
      queue_.pop_front();
      mu_.Unlock();
      // Who waits for the task hears of it by what it lets go of.
      CatchThrown("a task of a pool", [&] {
        task();
        return absl::OkStatus();
      }).IgnoreError();
      task = nullptr;
      mu_.Lock();
    } else if (stopping_) {
      break;
    } else if (!looked_on || announced_.load(std::memory_order_relaxed) != seen) {
      seen = announced_.load(std::memory_order_relaxed);
      mu_.Unlock();
      LookOn([&] { return announced_.load(std::memory_order_relaxed) != seen; });
      mu_.Lock();
      looked_on = true;
    } else {
      ++sleeping_;
      mu_.Unlock();
      FutexWait(announced_, seen);
      mu_.Lock();
      --sleeping_;
      looked_on = false;
    }
  }
  mu_.Unlock();
}

}  // namespace carrel
