#include "kvstore/replica/residence.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/shown.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "common/thrown.h"
#include "kvstore/engine/engine.h"

namespace carrel::kvstore {
namespace {

constexpr absl::Duration kTellEvery = absl::Seconds(1);
// Who was told that a context is here opens it next: it stays for so long.
constexpr absl::Duration kKeepTold = absl::Seconds(5);
// How soon it is seen that a context was closed, which makes room: nobody tells.
constexpr absl::Duration kRoomEvery = absl::Milliseconds(200);

std::string Called(const std::string& name) {
  return absl::StrCat("context \"", Shown(name), "\"");
}

}  // namespace

ResidenceTarget TargetOf(Engine& engine) {
  const auto list = [&engine]() -> absl::StatusOr<std::vector<LyingHere>> {
    std::vector<absl::Status> unreadable;
    ASSIGN_OR_RETURN(const std::vector<v1::Manifest> manifests, engine.List(&unreadable));
    for (const absl::Status& status : unreadable) {
      spdlog::warn("cache: {}", std::string(status.message()));
    }
    std::vector<LyingHere> here;
    for (const v1::Manifest& manifest : manifests) {
      ASSIGN_OR_RETURN(const auto stream, engine.Export(manifest.name()));
      here.push_back({manifest.name(), manifest.content_id(), stream->bytes()});
    }
    return here;
  };
  return {.list = list,
          .remove = [&engine](const std::string& name) { return engine.Delete(name); },
          .is_open = [&engine](const std::string& name) { return engine.IsOpen(name); },
          .import = [&engine](const std::string& name) { return engine.Import(name); }};
}

Residence::Residence(const ResidenceConfig& config, std::unique_ptr<Bucket> names,
                     std::unique_ptr<Bucket> files, ResidenceTarget target)
    : config_(config),
      names_(std::move(names)),
      files_(std::move(files)),
      target_(std::move(target)) {}

absl::StatusOr<std::unique_ptr<Residence>> Residence::Create(const ResidenceConfig& config,
                                                             std::unique_ptr<Bucket> names,
                                                             std::unique_ptr<Bucket> files,
                                                             ResidenceTarget target) {
  if (config.cache_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cache_bytes=", config.cache_bytes, " is not above 0"));
  }
  if (config.pulls < 1 || config.pulls > 64) {
    return absl::InvalidArgumentError(absl::StrCat("pulls=", config.pulls, " is outside [1, 64]"));
  }
  ASSIGN_OR_RETURN(const std::vector<LyingHere> here, target.list());
  std::unique_ptr<Residence> residence(
      new Residence(config, std::move(names), std::move(files), std::move(target)));
  {
    absl::MutexLock lock(&residence->mu_);
    for (const LyingHere& one : here) {
      Local& local = residence->local_[one.name];
      local.content_id = one.content_id;
      local.bytes = one.bytes;
      residence->local_bytes_ += one.bytes;
    }
  }
  for (int i = 0; i < config.pulls; ++i) {
    residence->threads_.emplace_back([self = residence.get()] { self->RunPulls(); });
  }
  residence->threads_.emplace_back([self = residence.get()] { self->RunLooks(); });
  return residence;
}

Residence::~Residence() {
  {
    absl::MutexLock lock(&mu_);
    ended_ = true;
  }
  if (config_.stop != nullptr) *config_.stop = true;
  for (std::thread& thread : threads_) thread.join();
  for (auto& [name, pull] : pulls_) {
    for (const Waiting& one : pull->waiting) {
      if (one.waiter.done && !one.handle.expired()) {
        one.waiter.done(absl::CancelledError(absl::StrCat(Called(name), ": the server ends")));
      }
    }
  }
}

bool Residence::Wanted(const Pull& pull) const {
  return std::any_of(pull.waiting.begin(), pull.waiting.end(),
                     [](const Waiting& one) { return !one.handle.expired(); });
}

std::shared_ptr<void> Residence::Bring(const std::string& name, ContextWaiter waiter) {
  auto handle = std::make_shared<int>(0);
  absl::Status now;
  {
    absl::MutexLock lock(&mu_);
    const auto local = local_.find(name);
    if (ended_) {
      now = absl::CancelledError(absl::StrCat(Called(name), ": the server ends"));
    } else if (local != local_.end() && !local->second.left) {
      local->second.last_use = ++uses_;
      local->second.keep_until = std::max(local->second.keep_until,
                                          SteadyNow() + std::min(kKeepTold, config_.keep_unopened));
      ++counted_.hits;
    } else if (waiting_ >= config_.most_waiting) {
      now = absl::ResourceExhaustedError(
          absl::StrCat(Called(name), ": ", waiting_, " already wait for contexts of the bucket"));
    } else {
      std::shared_ptr<Pull>& pull = pulls_[name];
      if (pull == nullptr) {
        pull = std::make_shared<Pull>();
        pull->name = name;
        queue_.push_back(pull);
      }
      ++waiting_;
      pull->waiting.push_back({std::move(waiter), handle});
      return handle;
    }
  }
  if (waiter.done) waiter.done(now);
  return handle;
}

absl::Status Residence::BringAndWait(const std::string& name,
                                     const std::function<bool()>& cancelled) {
  struct Ending {
    absl::Mutex mu;
    bool done = false;
    absl::Status status;
  };
  auto ending = std::make_shared<Ending>();
  const std::shared_ptr<void> handle = Bring(name, {.done = [ending](const absl::Status& status) {
                                               absl::MutexLock lock(&ending->mu);
                                               ending->status = status;
                                               ending->done = true;
                                             }});
  absl::MutexLock lock(&ending->mu);
  while (!ending->mu.AwaitWithTimeout(absl::Condition(&ending->done), absl::Milliseconds(100))) {
    if (cancelled && cancelled()) {
      return absl::CancelledError(absl::StrCat(Called(name), ": nobody waits for it any more"));
    }
  }
  return ending->status;
}

const std::string* Residence::FirstToGo() const {
  const std::string* first = nullptr;
  int64_t oldest = 0;
  const absl::Time now = SteadyNow();
  for (const auto& [name, local] : local_) {
    if (local.keep_until > now || target_.is_open(name)) continue;
    // What the bucket has no more goes before all others.
    const int64_t age = local.left ? -1 : local.last_use;
    if (first != nullptr && age >= oldest) continue;
    first = &name;
    oldest = age;
  }
  return first;
}

absl::Status Residence::RemoveLocal(const std::string& name) {
  const absl::Status status = target_.remove(name);
  if (!status.ok() && !absl::IsNotFound(status)) return status;
  absl::MutexLock lock(&mu_);
  const auto local = local_.find(name);
  if (local == local_.end()) return absl::OkStatus();
  local_bytes_ -= local->second.bytes;
  local_.erase(local);
  ++changed_;
  return absl::OkStatus();
}

absl::Status Residence::WaitForRoom(const std::shared_ptr<Pull>& pull, int64_t bytes) {
  if (bytes > config_.cache_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(Called(pull->name), ": ", bytes,
                                                     " bytes are more than the cache has (",
                                                     config_.cache_bytes, ", --cache-bytes)"));
  }
  for (;;) {
    std::string going;
    {
      absl::MutexLock lock(&mu_);
      if (ended_)
        return absl::CancelledError(absl::StrCat(Called(pull->name), ": the server ends"));
      if (!Wanted(*pull)) {
        return absl::CancelledError(absl::StrCat(Called(pull->name), ": nobody waits for it"));
      }
      if (local_bytes_ + bytes <= config_.cache_bytes) {
        local_bytes_ += bytes;
        return absl::OkStatus();
      }
      if (const std::string* const first = FirstToGo(); first != nullptr) {
        going = *first;
      } else {
        const int64_t seen = changed_;
        const auto changed = [this, seen] {
          mu_.AssertReaderHeld();
          return ended_ || changed_ != seen;
        };
        mu_.AwaitWithTimeout(absl::Condition(&changed), kRoomEvery);
        continue;
      }
    }
    const absl::Status removed = RemoveLocal(going);
    absl::MutexLock lock(&mu_);
    if (removed.ok()) {
      ++counted_.evictions;
      spdlog::info("{} goes: room for {}", Called(going), Called(pull->name));
      continue;
    }
    // It was opened meanwhile, or cannot be removed: another one next time.
    if (const auto local = local_.find(going); local != local_.end()) {
      local->second.last_use = ++uses_;
    }
    if (!absl::IsFailedPrecondition(removed)) {
      spdlog::warn("{}: {}", Called(going), std::string(removed.message()));
    }
  }
}

void Residence::Progress(const std::shared_ptr<Pull>& pull, int64_t bytes) {
  std::vector<std::pair<ContextWaiter, std::shared_ptr<void>>> told;
  int64_t of = 0;
  {
    absl::MutexLock lock(&mu_);
    pull->bytes = bytes;
    of = pull->of;
    const absl::Time now = SteadyNow();
    if (now - pull->told < kTellEvery) return;
    pull->told = now;
    for (const Waiting& one : pull->waiting) {
      std::shared_ptr<void> held = one.handle.lock();
      if (held != nullptr && one.waiter.progress) told.emplace_back(one.waiter, std::move(held));
    }
  }
  for (const auto& [waiter, held] : told) waiter.progress(bytes, of);
}

absl::Status Residence::Fetch(const std::shared_ptr<Pull>& pull, Local* brought) {
  // What is here and has left the bucket stands in the way of its name's next context.
  bool stale;
  {
    absl::MutexLock lock(&mu_);
    stale = local_.count(pull->name) > 0;
  }
  if (stale) {
    const absl::Status removed = RemoveLocal(pull->name);
    if (absl::IsFailedPrecondition(removed)) {
      return absl::UnavailableError(
          absl::StrCat(Called(pull->name),
                       ": the bucket has another one of this name, or none; "
                       "the one before is still open here: ask again soon"));
    }
    RETURN_IF_ERROR(removed);
  }
  // Whoever waits learns soon whether there is such a name, and whether the bucket is there.
  RETURN_IF_ERROR(names_->ReadName(pull->name).status());
  ASSIGN_OR_RETURN(const std::unique_ptr<BucketStream> stream,
                   BucketStream::Open(*files_, pull->name, config_.pull));
  const BoundName& bound = stream->name();
  {
    absl::MutexLock lock(&mu_);
    pull->of = stream->bytes();
  }
  RETURN_IF_ERROR(WaitForRoom(pull, bound.bytes));
  const absl::Time start = SteadyNow();
  const absl::Status status =
      PullContext(*stream, config_.pull, [&](const StreamSourceFn& source) -> absl::Status {
        ASSIGN_OR_RETURN(const std::unique_ptr<ContextImport> import, target_.import(pull->name));
        for (;;) {
          {
            absl::MutexLock lock(&mu_);
            if (ended_) return absl::CancelledError("the server ends");
          }
          ASSIGN_OR_RETURN(const absl::string_view bytes, source(import->position()));
          if (bytes.empty()) return import->Publish().status();
          RETURN_IF_ERROR(import->Take(bytes));
          Progress(pull, import->position());
        }
      });
  absl::MutexLock lock(&mu_);
  if (!status.ok()) {
    local_bytes_ -= bound.bytes;
    ++changed_;
    return status;
  }
  *brought = {.content_id = bound.content_id,
              .bytes = bound.bytes,
              .last_use = ++uses_,
              .keep_until = SteadyNow() + config_.keep_unopened};
  bound_[pull->name] = bound;
  counted_.pull_seconds += absl::ToDoubleSeconds(SteadyNow() - start);
  counted_.pulled_bytes += bound.bytes;
  return absl::OkStatus();
}

void Residence::RunPulls() {
  for (;;) {
    std::shared_ptr<Pull> pull;
    {
      absl::MutexLock lock(&mu_);
      const auto work = [this] {
        mu_.AssertReaderHeld();
        return ended_ || !queue_.empty();
      };
      mu_.Await(absl::Condition(&work));
      if (ended_) return;
      pull = std::move(queue_.front());
      queue_.pop_front();
      if (!Wanted(*pull)) {
        waiting_ -= static_cast<int64_t>(pull->waiting.size());
        pulls_.erase(pull->name);
        continue;
      }
    }
    Local brought;
    absl::Status status = CatchThrown("pull", [&] { return Fetch(pull, &brought); });
    std::list<Waiting> waiting;
    {
      absl::MutexLock lock(&mu_);
      if (absl::IsCancelled(status) && !ended_ && Wanted(*pull)) {
        queue_.push_back(std::move(pull));  // somebody came when it was given up
        continue;
      }
      if (status.ok()) {
        local_[pull->name] = std::move(brought);
        ++counted_.pulls;
      } else if (!absl::IsCancelled(status)) {
        ++counted_.pull_failures;
      }
      waiting = std::move(pull->waiting);
      waiting_ -= static_cast<int64_t>(waiting.size());
      pulls_.erase(pull->name);
    }
    if (!status.ok() && !absl::IsCancelled(status))
      spdlog::warn("pull of {}: {}", Called(pull->name), std::string(status.message()));
    for (const Waiting& one : waiting) {
      if (const auto held = one.handle.lock(); held != nullptr && one.waiter.done) {
        one.waiter.done(status);
      }
    }
  }
}

absl::Status Residence::Look() {
  absl::MutexLock looking(&looking_);
  std::vector<absl::Status> unreadable;
  ASSIGN_OR_RETURN(const std::vector<BoundName> names, names_->ListNames(&unreadable));
  for (const absl::Status& status : unreadable) {
    spdlog::warn("bucket: {}", std::string(status.message()));
  }
  std::vector<std::string> gone;
  {
    absl::MutexLock lock(&mu_);
    looked_ = SteadyNow();
    // A name that cannot be read says nothing of what is here under it.
    std::map<std::string, BoundName> bound;
    for (const BoundName& name : names) bound[name.name] = name;
    for (auto& [name, local] : local_) {
      const auto now = bound.find(name);
      const bool same = now != bound.end() && now->second.content_id == local.content_id;
      if (same || (now == bound.end() && !unreadable.empty())) continue;
      if (!local.left) {
        ++counted_.left_bucket;
        spdlog::info("{} left the bucket: it goes here, too", Called(name));
      }
      local.left = true;
      if (!target_.is_open(name)) gone.push_back(name);
    }
    bound_ = std::move(bound);
  }
  for (const std::string& name : gone) {
    // Still open, or being opened: the next look tries again.
    RemoveLocal(name).IgnoreError();
  }
  return absl::OkStatus();
}

void Residence::RunLooks() {
  bool answered = true;
  for (;;) {
    const absl::Status status = CatchThrown("look", [&] { return Look(); });
    if (status.ok() != answered) {
      answered = status.ok();
      if (answered) {
        spdlog::info("bucket: it answers again");
      } else {
        spdlog::warn("bucket: {}; what is here stays", std::string(status.message()));
      }
    }
    absl::MutexLock lock(&mu_);
    if (mu_.AwaitWithTimeout(absl::Condition(&ended_), config_.look_every)) return;
  }
}

bool Residence::IsHere(const std::string& name) const {
  absl::MutexLock lock(&mu_);
  const auto local = local_.find(name);
  return local != local_.end() && !local->second.left;
}

std::vector<BoundName> Residence::Names() const {
  absl::MutexLock lock(&mu_);
  std::vector<BoundName> names;
  for (const auto& [name, bound] : bound_) names.push_back(bound);
  return names;
}

ResidenceStatistics Residence::Statistics() const {
  absl::MutexLock lock(&mu_);
  ResidenceStatistics statistics = counted_;
  statistics.contexts = static_cast<int64_t>(local_.size());
  for (const auto& [name, local] : local_) statistics.bytes += local.bytes;
  statistics.cache_bytes = config_.cache_bytes;
  statistics.queued = static_cast<int64_t>(queue_.size());
  statistics.pulling = static_cast<int64_t>(pulls_.size()) - statistics.queued;
  statistics.waiting = waiting_;
  statistics.seconds_since_look = absl::ToDoubleSeconds(SteadyNow() - looked_);
  return statistics;
}

}  // namespace carrel::kvstore
