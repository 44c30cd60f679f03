// Built into programs of the tsan preset only. Debian's abseil is not instrumented: ThreadSanitizer does not see what its locks order and would call all that
// they guard a race. These definitions stand before the library's when symbols are bound, and do the same with pthread locks, and tell the sanitizer, which
// then knows who holds what, and reports locks that are taken in two orders, too; gRPC's locks are abseil's and come along. Slower than the original (every
// unlock wakes every waiter), otherwise alike.
#include <sanitizer/tsan_interface.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace {

using Clock = std::chrono::system_clock;

// What the one word of an absl::Mutex points at, made at first use.
struct Lock {
  int64_t known_by = 0;  // its address, which is no other lock's
  std::mutex mu;
  std::condition_variable changed;
  int readers = 0;
  bool writer = false;

  void Acquire(std::unique_lock<std::mutex>& held, bool exclusive) {
    changed.wait(held, [&] { return !writer && (!exclusive || readers == 0); });
    exclusive ? void(writer = true) : void(++readers);
  }
  void Release(bool exclusive) {
    exclusive ? void(writer = false) : void(--readers);
    changed.notify_all();
  }
};

// What the sanitizer is told of a lock, from before it is taken or given back until afterwards. Meanwhile it looks away from
// what orders the threads here: two who read are not in an order.
unsigned FlagsOf(bool exclusive) { return exclusive ? 0 : __tsan_mutex_read_lock; }

class Taking {
 public:
  Taking(Lock& lock, bool exclusive, unsigned how = 0)
      : known_by_(&lock.known_by), flags_(FlagsOf(exclusive) | how) {
    __tsan_mutex_pre_lock(known_by_, flags_);
  }
  ~Taking() { __tsan_mutex_post_lock(known_by_, flags_, 0); }
  void Failed() { flags_ |= __tsan_mutex_try_lock_failed; }

 private:
  int64_t* const known_by_;
  unsigned flags_;
};

class GivingBack {
 public:
  GivingBack(Lock& lock, bool exclusive) : known_by_(&lock.known_by), flags_(FlagsOf(exclusive)) {
    __tsan_mutex_pre_unlock(known_by_, flags_);
  }
  ~GivingBack() { __tsan_mutex_post_unlock(known_by_, flags_); }

 private:
  int64_t* const known_by_;
  const unsigned flags_;
};

struct Signals {
  std::mutex mu;
  std::condition_variable changed;
  uint64_t all = 0;      // everyone who waits since before this is woken
  uint64_t tickets = 0;  // single wake-ups not taken yet
  uint64_t waiting = 0;
};

template <typename Impl>
Impl& Of(void* object) {
  static_assert(sizeof(absl::Mutex) == sizeof(void*) && sizeof(absl::CondVar) == sizeof(void*));
  auto& word = *static_cast<std::atomic<Impl*>*>(object);
  Impl* impl = word.load(std::memory_order_acquire);
  if (impl != nullptr) return *impl;
  Impl* fresh = new Impl;
  if (word.compare_exchange_strong(impl, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *impl;
}

// The state is leaked: an unlock may still be on its way out of it when the lock's owner is gone.
template <typename Impl>
void Destroy(void* object) {
  static_cast<std::atomic<Impl*>*>(object)->exchange(nullptr);
}

void LockFor(void* object, bool exclusive) {
  Lock& lock = Of<Lock>(object);
  const Taking taking(lock, exclusive);
  std::unique_lock<std::mutex> held(lock.mu);
  lock.Acquire(held, exclusive);
}

bool TryLockFor(void* object, bool exclusive) {
  Lock& lock = Of<Lock>(object);
  Taking taking(lock, exclusive, __tsan_mutex_try_lock);
  std::unique_lock<std::mutex> held(lock.mu);
  if (lock.writer || (exclusive && lock.readers > 0)) {
    taking.Failed();
    return false;
  }
  lock.Acquire(held, exclusive);
  return true;
}

void Unlock(void* object, bool exclusive) {
  Lock& lock = Of<Lock>(object);
  const GivingBack giving_back(lock, exclusive);
  std::unique_lock<std::mutex> held(lock.mu);
  lock.Release(exclusive);
}

Clock::time_point ToClock(absl::Time deadline) {
  // Waits until "infinity" overflow some clocks: a day is as good, its caller loops or gives up.
  const absl::Time latest = absl::Now() + absl::Hours(24);
  return absl::ToChronoTime(deadline < latest ? deadline : latest);
}

// Held on entry and on return. False if the deadline came first.
bool AwaitUntil(void* object, const absl::Condition& condition, absl::Time deadline) {
  Lock& lock = Of<Lock>(object);
  const bool exclusive = lock.writer;  // of who holds it
  for (;;) {
    const bool met = condition.Eval();
    if (met || absl::Now() >= deadline) return met;
    // Nobody comes between the two: what changes after the condition was looked at wakes who waits.
    std::optional<GivingBack> giving_back(std::in_place, lock, exclusive);
    std::unique_lock<std::mutex> held(lock.mu);
    lock.Release(exclusive);
    giving_back.reset();
    const Taking taking(lock, exclusive);
    lock.changed.wait_until(held, ToClock(deadline));
    lock.Acquire(held, exclusive);
    held.unlock();
  }
}

bool WaitUntil(void* object, absl::Mutex* mutex, absl::Time deadline) {
  Signals& signals = Of<Signals>(object);
  std::unique_lock<std::mutex> held(signals.mu);
  const uint64_t all = signals.all;
  ++signals.waiting;
  mutex->Unlock();
  const bool woken = signals.changed.wait_until(
      held, ToClock(deadline), [&] { return signals.all != all || signals.tickets > 0; });
  if (woken && signals.all == all) --signals.tickets;
  --signals.waiting;
  if (signals.tickets > signals.waiting) signals.tickets = signals.waiting;
  held.unlock();
  mutex->Lock();
  return !woken;
}

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

Mutex::~Mutex() { Destroy<::Lock>(this); }
void Mutex::Lock() { LockFor(this, true); }
void Mutex::Unlock() { ::Unlock(this, true); }
bool Mutex::TryLock() { return TryLockFor(this, true); }
void Mutex::ReaderLock() { LockFor(this, false); }
void Mutex::ReaderUnlock() { ::Unlock(this, false); }
bool Mutex::ReaderTryLock() { return TryLockFor(this, false); }
void Mutex::AssertHeld() const {}
void Mutex::AssertReaderHeld() const {}
void Mutex::AssertNotHeld() const {}
void Mutex::Await(const Condition& condition) {
  while (!AwaitUntil(this, condition, InfiniteFuture())) {
  }
}
bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  return AwaitUntil(this, condition, Now() + timeout);
}
bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  return AwaitUntil(this, condition, deadline);
}
void Mutex::LockWhen(const Condition& condition) {
  Lock();
  Await(condition);
}
bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  Lock();
  return AwaitWithTimeout(condition, timeout);
}
bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  Lock();
  return AwaitWithDeadline(condition, deadline);
}
void Mutex::ReaderLockWhen(const Condition& condition) {
  ReaderLock();
  Await(condition);
}
bool Mutex::ReaderLockWhenWithTimeout(const Condition& condition, Duration timeout) {
  ReaderLock();
  return AwaitWithTimeout(condition, timeout);
}
bool Mutex::ReaderLockWhenWithDeadline(const Condition& condition, Time deadline) {
  ReaderLock();
  return AwaitWithDeadline(condition, deadline);
}

CondVar::~CondVar() { Destroy<Signals>(this); }
void CondVar::Wait(Mutex* mutex) {
  WaitUntil(this, mutex, InfiniteFuture());
}  // may wake spuriously, as callers expect
bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  return WaitUntil(this, mutex, Now() + timeout);
}
bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  return WaitUntil(this, mutex, deadline);
}
void CondVar::Signal() {
  Signals& signals = Of<Signals>(this);
  std::unique_lock<std::mutex> held(signals.mu);
  if (signals.tickets < signals.waiting) ++signals.tickets;
  signals.changed.notify_all();
}
void CondVar::SignalAll() {
  Signals& signals = Of<Signals>(this);
  std::unique_lock<std::mutex> held(signals.mu);
  ++signals.all;
  signals.changed.notify_all();
}

Notification::~Notification() { MutexLock lock(&mutex_); }
void Notification::Notify() {
  MutexLock lock(&mutex_);
  notified_yet_.store(true, std::memory_order_release);
}
void Notification::WaitForNotification() const {
  MutexLock lock(&mutex_);
  mutex_.Await(Condition(&HasBeenNotifiedInternal, &notified_yet_));
}
bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  return WaitForNotificationWithDeadline(Now() + timeout);
}
bool Notification::WaitForNotificationWithDeadline(Time deadline) const {
  MutexLock lock(&mutex_);
  return mutex_.AwaitWithDeadline(Condition(&HasBeenNotifiedInternal, &notified_yet_), deadline);
}

ABSL_NAMESPACE_END
}  // namespace absl

// What orders gRPC's threads beyond its locks (its queues of atomics) is in libraries that are not instrumented: left out are races whose last step is in
// them, and their handling of a message's bytes in headers that are compiled into us. Our own code in their callbacks is still watched.
// RocksDB's version, the list of its files, is freed by whoever counts it down to zero, after others have read it: we never see one.
// A connection that was given up may be taken down by a thread of gRPC's own, which then joins the others while the program already ends.
extern "C" const char* __tsan_default_suppressions() {
  return "race_top:grpc::\n"
         "race_top:grpc_core::\n"
         "race_top:libgrpc\n"
         "race_top:libgpr\n"
         "thread:grpc_core::Thread::Thread\n"
         "race:grpc::internal::ServerCallbackCall::Ref\n"  // a call's count, an atomic in a header
         "race:grpc::internal::ServerCallbackCall::Unref\n"
         // a call's own callbacks, freed by who counted it down to zero (in the library)
         "race:Impl::~ServerCallback\n"
         "race_top:std::function<void (bool)>::operator()\n"
         "race_top:std::_Function_base::_M_empty\n"
         "race:grpc::internal::CallOpSet\n"
         "race:grpc::internal::CallOp\n"
         "race:grpc::internal::InterceptorBatchMethodsImpl\n"
         "race:grpc::GenericDeserialize\n"
         "race:grpc::GenericSerialize\n"
         "race:grpc::SerializationTraits\n"
         "called_from_lib:libgrpc.so\n"
         "called_from_lib:libgrpc++.so\n"
         "called_from_lib:libgpr.so\n"
         "called_from_lib:libabsl_status.so\n"
         "called_from_lib:libabsl_cord.so\n"
         "called_from_lib:libupb.so\n"
         "called_from_lib:libprotobuf.so\n"  // bytes that gRPC hands it
         "called_from_lib:libssl.so\n"       // within gRPC's connections, one thread at a time
         "called_from_lib:libcrypto.so\n"
         "race:rocksdb::Version::Unref\n"
         "race:libabsl_random_internal_pool_urbg.so\n"  // made once, which an atomic in the library orders
         "race:absl::debian3::time_internal::cctz::time_zone::Impl::LoadTimeZone\n"
         "race:absl::debian3::Status::Unref\n"  // its count is the library's
         "race:libabsl_status.so\n"             // as are the words of those that gRPC made
         "race:absl::debian3::inlined_vector_internal::Storage<absl::debian3::status_internal::"
         "Payload\n";
}
