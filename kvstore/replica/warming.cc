#include "kvstore/replica/warming.h"

#include <spdlog/spdlog.h>

#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/shown.h"
#include "common/steady_time.h"

namespace carrel::kvstore {
namespace {

enum class State : uint8_t { kToAsk, kAsked, kHere, kGivenUp };

}  // namespace

// Kept by what the residence tells, which may come after the end.
struct Warming::Shared {
  struct One {
    std::string name;
    State state = State::kToAsk;
    absl::Time not_before = absl::InfinitePast();  // asked again
    std::shared_ptr<void> handle;
    std::string told;  // what the log said last
    bool told_of_room = false;
  };

  void WaitsForRoom(size_t i) {
    absl::MutexLock lock(&mu);
    if (std::exchange(all[i].told_of_room, true)) return;
    spdlog::warn(
        "warm: context {} waits for room: the cache is too small for all that is to be warm",
        Shown(all[i].name));
  }

  void Came(size_t i, const absl::Status& status, absl::Duration try_every) {
    absl::MutexLock lock(&mu);
    One& one = all[i];
    changed = true;
    if (status.ok()) {
      one.state = State::kHere;
      return;
    }
    one.state = absl::IsNotFound(status) ? State::kGivenUp : State::kToAsk;
    one.not_before = SteadyNow() + try_every;
    const std::string words(status.message());
    if (ended || std::exchange(one.told, words) == words) return;
    spdlog::warn("warm: context {}: {}; {}", Shown(one.name), words,
                 absl::IsNotFound(status) ? "it is not waited for" : "it is tried again");
  }

  mutable absl::Mutex mu;
  std::vector<One> all ABSL_GUARDED_BY(mu);
  bool changed ABSL_GUARDED_BY(mu) = false;
  bool ended ABSL_GUARDED_BY(mu) = false;
  bool ready ABSL_GUARDED_BY(mu) = false;
};

Warming::Warming(Residence& residence, const std::vector<std::string>& names,
                 std::function<void()> ready, absl::Duration try_every)
    : residence_(residence),
      tell_(std::move(ready)),
      try_every_(try_every),
      shared_(std::make_shared<Shared>()) {
  {
    absl::MutexLock lock(&shared_->mu);
    for (const std::string& name : std::set<std::string>(names.begin(), names.end())) {
      shared_->all.push_back({.name = name});
    }
    residence_.SetWarming(static_cast<int64_t>(shared_->all.size()));
  }
  thread_ = std::thread([this] { Run(); });
}

Warming::~Warming() {
  {
    absl::MutexLock lock(&shared_->mu);
    shared_->ended = true;
  }
  thread_.join();
  LetGo();
}

bool Warming::ready() const {
  absl::MutexLock lock(&shared_->mu);
  return shared_->ready;
}

void Warming::LetGo() {
  std::vector<std::shared_ptr<void>> handles;  // go without the lock
  absl::MutexLock lock(&shared_->mu);
  for (Shared::One& one : shared_->all) handles.push_back(std::move(one.handle));
}

void Warming::Ask(size_t i, const std::string& name) {
  std::shared_ptr<void> handle = residence_.Bring(
      name, {.later = true,
             .progress =
                 [shared = shared_, i](const ContextComes& comes) {
                   if (comes.waits_for_room) shared->WaitsForRoom(i);
                 },
             .done = [shared = shared_, i, every = try_every_](
                         const absl::Status& status) { shared->Came(i, status, every); }});
  absl::MutexLock lock(&shared_->mu);
  shared_->all[i].handle = std::move(handle);
}

void Warming::Run() {
  for (;;) {
    std::vector<std::pair<size_t, std::string>> to_ask;
    int64_t missing = 0;
    {
      absl::MutexLock lock(&shared_->mu);
      if (shared_->ended) return;
      shared_->changed = false;
      for (size_t i = 0; i < shared_->all.size(); ++i) {
        Shared::One& one = shared_->all[i];
        missing += one.state == State::kToAsk || one.state == State::kAsked ? 1 : 0;
        if (one.state != State::kToAsk || SteadyNow() < one.not_before) continue;
        one.state = State::kAsked;
        to_ask.emplace_back(i, one.name);
      }
    }
    residence_.SetWarming(missing);
    if (missing == 0) break;
    for (const auto& [i, name] : to_ask) Ask(i, name);
    absl::MutexLock lock(&shared_->mu);
    const auto look = [shared = shared_.get()] {
      shared->mu.AssertReaderHeld();
      return shared->ended || shared->changed;
    };
    shared_->mu.AwaitWithTimeout(absl::Condition(&look), try_every_);
  }
  {
    absl::MutexLock lock(&shared_->mu);
    shared_->ready = true;
  }
  LetGo();
  if (tell_ != nullptr) tell_();
}

}  // namespace carrel::kvstore
