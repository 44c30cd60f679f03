#include "kvstore/replica/residence.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/metric_family.h"
#include "common/shown.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "common/thrown.h"
#include "kvstore/engine/engine.h"
#include "kvstore/format/context_name.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

constexpr absl::Duration kTellEvery = absl::Seconds(1);
// Who was told that a context is here, and opens it later, opens it next: it stays for so long.
constexpr absl::Duration kKeepTold = absl::Seconds(5);
// How soon it is seen that a context was closed, which makes room: nobody tells.
constexpr absl::Duration kRoomEvery = absl::Milliseconds(200);

// That a bucket does not take this server's own credentials is no fault of who asks, nor his to read.
absl::Status ToldOf(const std::string& name, const absl::Status& status) {
  if (!absl::IsUnauthenticated(status) && !absl::IsPermissionDenied(status)) return status;
  return absl::UnavailableError(absl::StrCat(
      "context \"", Shown(name), "\": the bucket does not take this server's credentials"));
}

// Of a status: the bucket said nothing of a name, and would not of another.
constexpr char kNoAnswerUrl[] = "carrel/no-answer";

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
      ASSIGN_OR_RETURN(const auto stream, engine.store().Export(manifest.name()));
      here.push_back({manifest.name(), manifest.content_id(), stream->bytes()});
    }
    return here;
  };
  return {.list = list,
          .remove = [&engine](const std::string& name) { return engine.Delete(name); },
          .is_open = [&engine](const std::string& name) { return engine.IsOpen(name); },
          .import = [&engine](const std::string& name) { return engine.store().Import(name); },
          .describe = [&engine](const std::string& name) { return engine.Get(name); }};
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
  residence->threads_.emplace_back([self = residence.get()] { self->RunTells(); });
  return residence;
}

Residence::~Residence() {
  End();
  for (std::thread& thread : threads_) thread.join();
}

void Residence::End() {
  std::vector<std::pair<std::string, std::list<Waiting>>> waiting;
  {
    absl::MutexLock lock(&mu_);
    if (ended_) return;
    ended_ = true;
    std::vector<std::shared_ptr<Pull>> pulls;  // waiting lets go of the lock
    for (const auto& [name, pull] : pulls_) pulls.push_back(pull);
    for (const std::shared_ptr<Pull>& pull : pulls) {
      const auto quiet = [&pull, this] {
        mu_.AssertReaderHeld();
        return !pull->telling;
      };
      mu_.Await(absl::Condition(&quiet));
      waiting_ -= static_cast<int64_t>(pull->waiting.size());
      waiting.emplace_back(pull->name, std::move(pull->waiting));
      pull->waiting.clear();
    }
  }
  if (config_.stop != nullptr) *config_.stop = true;
  for (const auto& [name, all] : waiting) {
    for (const Waiting& one : all) {
      if (const auto held = one.handle.lock(); held != nullptr && one.waiter.done) {
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
  auto handle = std::make_shared<Handle>();
  absl::Status now;
  {
    absl::MutexLock lock(&mu_);
    const auto local = local_.find(name);
    if (ended_) {
      now = absl::CancelledError(absl::StrCat(Called(name), ": the server ends"));
    } else if (!ValidateContextName(name).ok()) {
      // Also what a door asks for instead of a context that its caller does not see.
      now = absl::NotFoundError(absl::StrCat("there is no ", Called(name)));
    } else if (local != local_.end() && !local->second.left && !local->second.going) {
      local->second.last_use = ++uses_;
      handle->hold = local->second.hold;
      local->second.keep_until =
          waiter.later ? std::max(local->second.keep_until,
                                  SteadyNow() + std::min(kKeepTold, config_.keep_unopened))
                       : absl::InfinitePast();  // it is opened: the handle keeps it
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

const std::string* Residence::FirstToGo() const {
  const std::string* first = nullptr;
  int64_t oldest = 0;
  const absl::Time now = SteadyNow();
  for (const auto& [name, local] : local_) {
    if (local.going || local.keep_until > now || local.held() || target_.is_open(name)) continue;
    // What the bucket has no more goes before all others.
    const int64_t age = local.left ? -1 : local.last_use;
    if (first != nullptr && age >= oldest) continue;
    first = &name;
    oldest = age;
  }
  return first;
}

bool Residence::StaysHere(const std::string& name) {
  const auto settled = [&] {
    mu_.AssertReaderHeld();
    const auto local = local_.find(name);
    return local == local_.end() || !local->second.going;
  };
  mu_.Await(absl::Condition(&settled));
  return local_.count(name) > 0;
}

absl::Status Residence::RemoveLocal(const std::string& name) {
  {
    absl::MutexLock lock(&mu_);
    if (!StaysHere(name)) return absl::OkStatus();
    local_.at(name).going = true;
  }
  return RemoveGoing(name);
}

absl::Status Residence::RemoveGoing(const std::string& name) {
  const absl::Status status = CatchThrown("removal", [&] { return target_.remove(name); });
  absl::MutexLock lock(&mu_);
  ++changed_;
  const auto local = local_.find(name);
  if (!status.ok() && !absl::IsNotFound(status)) {
    local->second.going = false;
    return status;
  }
  local_bytes_ -= local->second.bytes;
  local_.erase(local);
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
      pull->comes.waits_for_room = false;
      if (local_bytes_ + bytes <= config_.cache_bytes) {
        local_bytes_ += bytes;
        return absl::OkStatus();
      }
      if (const std::string* const first = FirstToGo(); first != nullptr) {
        going = *first;
        local_.at(going).going = true;
      } else {
        pull->comes.waits_for_room = true;
        const int64_t seen = changed_;
        const auto changed = [this, seen] {
          mu_.AssertReaderHeld();
          return ended_ || changed_ != seen;
        };
        mu_.AwaitWithTimeout(absl::Condition(&changed), kRoomEvery);
        continue;
      }
    }
    const absl::Status removed = RemoveGoing(going);
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

void Residence::Tell(const std::shared_ptr<Pull>& pull) {
  std::vector<std::pair<ContextWaiter, std::shared_ptr<void>>> told;
  ContextComes comes;
  {
    absl::MutexLock lock(&mu_);
    const absl::Time now = SteadyNow();
    if (pull->telling || now - pull->told < kTellEvery) return;
    pull->told = now;
    pull->telling = true;
    comes = pull->comes;
    for (const Waiting& one : pull->waiting) {
      std::shared_ptr<void> held = one.handle.lock();
      if (held != nullptr && one.waiter.progress) told.emplace_back(one.waiter, std::move(held));
    }
  }
  for (const auto& [waiter, held] : told) waiter.progress(comes);
  told.clear();
  absl::MutexLock lock(&mu_);
  pull->telling = false;
}

// Who waits behind other pulls, or for room, hears that he does.
void Residence::RunTells() {
  for (;;) {
    std::vector<std::shared_ptr<Pull>> pulls;
    {
      absl::MutexLock lock(&mu_);
      if (mu_.AwaitWithTimeout(absl::Condition(&ended_), kTellEvery)) return;
      for (const auto& [name, pull] : pulls_) pulls.push_back(pull);
    }
    for (const std::shared_ptr<Pull>& pull : pulls) Tell(pull);
  }
}

absl::Status Residence::Fetch(const std::shared_ptr<Pull>& pull, std::optional<Local>* brought) {
  // What is here and has left the bucket stands in the way of its name's next context.
  bool stale;
  {
    absl::MutexLock lock(&mu_);
    stale = StaysHere(pull->name);
    if (stale && !local_.at(pull->name).left) return absl::OkStatus();  // it could not be removed
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
  absl::Status named = names_->ReadName(pull->name).status();
  if (absl::IsUnavailable(named)) named.SetPayload(kNoAnswerUrl, absl::Cord("1"));
  RETURN_IF_ERROR(named);
  ASSIGN_OR_RETURN(const std::unique_ptr<BucketStream> stream,
                   BucketStream::Open(*files_, pull->name, config_.pull));
  const BoundName& bound = stream->name();
  {
    absl::MutexLock lock(&mu_);
    pull->comes = {.of = stream->bytes()};
  }
  RETURN_IF_ERROR(WaitForRoom(pull, bound.bytes));
  const absl::Time start = SteadyNow();
  const absl::Status status =
      PullContext(*stream, [&](const StreamSourceFn& source) -> absl::Status {
        ASSIGN_OR_RETURN(const std::unique_ptr<ContextImport> import, target_.import(pull->name));
        const auto next = [&](int64_t offset) -> absl::StatusOr<absl::string_view> {
          {
            absl::MutexLock lock(&mu_);
            if (ended_) return absl::CancelledError("the server ends");
          }
          return source(offset);
        };
        return ImportFrom(next, *import,
                          [&](int64_t position, int64_t) {
                            {
                              absl::MutexLock lock(&mu_);
                              pull->comes.bytes = position;
                            }
                            Tell(pull);
                          })
            .status();
      });
  absl::MutexLock lock(&mu_);
  if (!status.ok()) {
    local_bytes_ -= bound.bytes;
    ++changed_;
    return status;
  }
  *brought = Local{.content_id = bound.content_id, .bytes = bound.bytes, .last_use = ++uses_};
  bound_[pull->name] = bound;
  counted_.pull_seconds += absl::ToDoubleSeconds(SteadyNow() - start);
  counted_.pulled_bytes += bound.bytes;
  return absl::OkStatus();
}

void Residence::Arrived(const Pull& pull, std::optional<Local> brought) {
  counted_.pulls += brought.has_value() ? 1 : 0;
  counted_.hits += brought.has_value() ? 0 : 1;
  if (brought.has_value()) local_[pull.name] = *std::move(brought);
  Local& local = local_.at(pull.name);
  for (const Waiting& one : pull.waiting) {
    const auto held = one.handle.lock();
    if (held == nullptr) continue;
    held->hold = local.hold;
    if (one.waiter.later) local.keep_until = SteadyNow() + config_.keep_unopened;
  }
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
    std::optional<Local> brought;
    absl::Status status = CatchThrown("pull", [&] { return Fetch(pull, &brought); });
    std::vector<std::shared_ptr<Pull>> over = {pull};
    std::list<Waiting> waiting;
    {
      absl::MutexLock lock(&mu_);
      if (absl::IsCancelled(status) && !ended_ && Wanted(*pull)) {
        queue_.push_back(std::move(pull));  // somebody came when it was given up
        continue;
      }
      if (status.ok() && !brought.has_value()) {
        const auto local = local_.find(pull->name);
        if (local == local_.end() || local->second.left || local->second.going) {
          queue_.push_back(std::move(pull));  // not any more
          continue;
        }
      }
      // Who waits behind it would ask a bucket that says nothing, one after the other.
      if (status.GetPayload(kNoAnswerUrl).has_value()) {
        over.insert(over.end(), queue_.begin(), queue_.end());
        queue_.clear();
      }
      for (const std::shared_ptr<Pull>& one : over) {
        // Who waits is told by one thread at a time.
        const auto quiet = [&one, this] {
          mu_.AssertReaderHeld();
          return !one->telling;
        };
        mu_.Await(absl::Condition(&quiet));
        waiting_ -= static_cast<int64_t>(one->waiting.size());
        pulls_.erase(one->name);
      }
      if (status.ok()) {
        Arrived(*pull, std::move(brought));
      } else if (!absl::IsCancelled(status)) {
        counted_.pull_failures += static_cast<int64_t>(over.size());
      }
      for (const std::shared_ptr<Pull>& one : over) waiting.splice(waiting.end(), one->waiting);
    }
    if (!status.ok() && !absl::IsCancelled(status))
      spdlog::warn("pull of {}: {}", Called(pull->name), std::string(status.message()));
    const absl::Status told = ToldOf(pull->name, status);
    for (const Waiting& one : waiting) {
      if (const auto held = one.handle.lock(); held != nullptr && one.waiter.done) {
        one.waiter.done(told);
      }
    }
  }
}

absl::Status Residence::Look() {
  absl::MutexLock looking(&looking_);
  std::vector<absl::Status> unreadable;
  std::map<std::string, BoundName> known;
  {
    absl::MutexLock lock(&mu_);
    known = bound_;
  }
  ASSIGN_OR_RETURN(const std::vector<BoundName> names, names_->ListNames(&unreadable, &known));
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

std::vector<SourceContext> Residence::Contexts() const {
  absl::MutexLock lock(&mu_);
  std::map<std::string, SourceContext> all;
  for (const auto& [name, bound] : bound_) {
    all[name] = {
        .name = name, .content_id = bound.content_id, .tokens = bound.tokens, .bytes = bound.bytes};
  }
  for (const auto& [name, local] : local_) {
    if (local.left) continue;
    SourceContext& one = all[name];
    one.name = name;
    one.content_id = local.content_id;
    one.bytes = local.bytes;
    one.here = !local.going;
  }
  std::vector<SourceContext> contexts;
  for (auto& [name, context] : all) contexts.push_back(std::move(context));
  return contexts;
}

absl::StatusOr<v1::Manifest> Residence::Describe(const std::string& name) {
  if (IsHere(name)) {
    absl::StatusOr<v1::Manifest> here = target_.describe(name);
    if (!absl::IsNotFound(here.status())) return here;  // else it went meanwhile
  }
  if (!ValidateContextName(name).ok()) {
    return absl::NotFoundError(absl::StrCat("there is no ", Called(name)));
  }
  const absl::StatusOr<BoundName> bound = names_->ReadName(name);
  if (!bound.ok()) {
    if (!absl::IsNotFound(bound.status())) {
      spdlog::warn("bucket: {}: {}", Called(name), std::string(bound.status().message()));
    }
    return ToldOf(name, bound.status());
  }
  ASSIGN_OR_RETURN(const BucketManifest there, names_->ReadManifestOf(*bound));
  v1::Manifest manifest;
  if (!manifest.ParseFromString(there.header.manifest)) {
    return absl::DataLossError(absl::StrCat(Called(name), ": its manifest is no Manifest message"));
  }
  manifest.set_name(name);
  manifest.set_content_id(there.ContentId());
  return manifest;
}

bool Residence::IsHere(const std::string& name) const {
  absl::MutexLock lock(&mu_);
  const auto local = local_.find(name);
  return local != local_.end() && !local->second.left && !local->second.going;
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
  statistics.warming = warming_;
  statistics.seconds_since_look = absl::ToDoubleSeconds(SteadyNow() - looked_);
  return statistics;
}

std::vector<MetricFamily> ResidenceMetrics(const ResidenceStatistics& s) {
  return {
      GaugeFamily("carrel_replica_contexts", "Contexts of the bucket that lie here.", s.contexts),
      GaugeFamily("carrel_replica_bytes", "Bytes of contexts of the bucket that lie here.",
                  s.bytes),
      GaugeFamily("carrel_replica_cache_bytes", "Bytes that they may take.", s.cache_bytes),
      GaugeFamily("carrel_replica_pulling", "Contexts on their way here.", s.pulling),
      GaugeFamily("carrel_replica_queued", "Contexts that wait for another's pull to end.",
                  s.queued),
      GaugeFamily("carrel_replica_waiting", "Sessions that wait for a context.", s.waiting),
      GaugeFamily("carrel_replica_warming", "Contexts of --warm that are not here yet.", s.warming),
      GaugeFamily("carrel_replica_seconds_since_look", "Since the bucket's names were read last.",
                  s.seconds_since_look),
      TotalFamily("carrel_replica_pulls_total", "Contexts that came.", s.pulls),
      TotalFamily("carrel_replica_pull_failures_total", "Pulls that ended without one.",
                  s.pull_failures),
      TotalFamily("carrel_replica_pulled_bytes_total", "Bytes of contexts that came.",
                  s.pulled_bytes),
      TotalFamily("carrel_replica_pull_seconds_total", "That their bytes took.", s.pull_seconds),
      TotalFamily("carrel_replica_hits_total", "Sessions whose context was here.", s.hits),
      TotalFamily("carrel_replica_evictions_total", "Contexts that went to make room.",
                  s.evictions),
      TotalFamily("carrel_replica_left_bucket_total",
                  "Contexts that went because the bucket has them no more.", s.left_bucket)};
}

absl::Status ClaimCacheFolder(const std::string& folder, const std::string& uri,
                              const Store& store) {
  const std::string path = folder + "/replica-of";
  const absl::StatusOr<std::string> marked = ReadFile(path);
  if (marked.ok()) {
    const std::string of(absl::StripAsciiWhitespace(*marked));
    if (of == uri) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("cache ", folder, " holds contexts of ", Shown(of), ", not of ", Shown(uri)));
  }
  if (!absl::IsNotFound(marked.status())) return marked.status();
  std::vector<absl::Status> unreadable;
  ASSIGN_OR_RETURN(const std::vector<v1::Manifest> here, store.List(&unreadable));
  if (!here.empty() || !unreadable.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cache ", folder, " is a store with contexts of its own, which a replica would remove: ",
        "give a folder that is empty or not there yet"));
  }
  return WriteFileAtomically(path, absl::StrCat(uri, "\n"));
}

}  // namespace carrel::kvstore
