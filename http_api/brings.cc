#include "http_api/brings.h"

#include <atomic>
#include <utility>

namespace carrel::http_api {
namespace {

// Given to who waits before the store has given its own.
struct Hold {
  std::shared_ptr<void> handle;
};

}  // namespace

// Kept by what the store tells, which may come after the end.
struct Brings::Shared {
  struct Waiting {
    Waiter waiter;
    std::shared_ptr<Hold> hold;
  };

  // Calls `fn` with who waits under the number, unless he does no more; takes him out where `last`.
  template <typename Fn>
  void With(int64_t id, bool last, Fn&& fn) {
    std::shared_ptr<Waiting> one;
    {
      absl::MutexLock lock(&mu);
      const auto found = waiting.find(id);
      if (found == waiting.end()) return;
      one = found->second;
      if (last) waiting.erase(found);
      ++running;
    }
    fn(*one);
    one = nullptr;  // before who ends us goes on
    absl::MutexLock lock(&mu);
    --running;
  }

  absl::Mutex mu;
  bool ended ABSL_GUARDED_BY(mu) = false;
  int running ABSL_GUARDED_BY(mu) = 0;
  int64_t next ABSL_GUARDED_BY(mu) = 0;
  std::map<int64_t, std::shared_ptr<Waiting>> waiting ABSL_GUARDED_BY(mu);
};

Brings::Brings(library::StoreAccess* store) : store_(store), shared_(std::make_shared<Shared>()) {}

void Brings::End() {
  std::map<int64_t, std::shared_ptr<Shared::Waiting>> left;
  {
    absl::MutexLock lock(&shared_->mu);
    shared_->ended = true;
    left.swap(shared_->waiting);
    const auto quiet = [this] {
      shared_->mu.AssertReaderHeld();
      return shared_->running == 0;
    };
    shared_->mu.Await(absl::Condition(&quiet));
  }
  for (const auto& [id, one] : left) {
    one->waiter.done(absl::UnavailableError("the server is stopping"), nullptr);
  }
}

void Brings::Bring(const std::string& name, Waiter waiter) {
  const auto one = std::make_shared<Shared::Waiting>();
  one->waiter = std::move(waiter);
  one->hold = std::make_shared<Hold>();
  int64_t id = -1;
  {
    absl::MutexLock lock(&shared_->mu);
    if (!shared_->ended) {
      id = shared_->next++;
      shared_->waiting[id] = one;
    }
  }
  if (id < 0) {
    return one->waiter.done(absl::UnavailableError("the server is stopping"), nullptr);
  }
  const std::shared_ptr<Hold> hold = one->hold;
  std::shared_ptr<void> handle = store_->Bring(
      name, {.later = one->waiter.later,
             .progress =
                 [shared = shared_, id](const kvstore::ContextComes& comes) {
                   bool goes_on = true;
                   shared->With(id, /*last=*/false, [&](Shared::Waiting& of) {
                     goes_on = !of.waiter.progress || of.waiter.progress(comes);
                   });
                   if (!goes_on) shared->With(id, /*last=*/true, [](Shared::Waiting&) {});
                 },
             .done =
                 [shared = shared_, id](const absl::Status& here) {
                   const absl::Status told =
                       absl::IsCancelled(here) ? absl::UnavailableError(here.message()) : here;
                   shared->With(id, /*last=*/true, [&](Shared::Waiting& of) {
                     of.waiter.done(told, told.ok() ? of.hold : nullptr);
                   });
                 }});
  // Whoever was told meanwhile keeps `hold` and nothing in it yet.
  absl::MutexLock lock(&shared_->mu);
  hold->handle = std::move(handle);
}

std::shared_ptr<void> Brings::HoldIfHere(const std::string& name) {
  const auto here = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<void> handle = store_->Bring(
      name,
      {.progress = nullptr, .done = [here](const absl::Status& status) { *here = status.ok(); }});
  return *here ? handle : nullptr;
}

}  // namespace carrel::http_api
