#include "kvstore/engine/engine.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "carrel/v1/context.pb.h"
#include "common/machine_memory.h"
#include "common/shown.h"
#include "common/status.h"
#include "common/thrown.h"
#include "common/usable_cores.h"
#include "kvstore/engine/request_metrics.h"
#include "kvstore/engine/validate.h"
#include "kvstore/format/manifest.h"
#include "kvstore/storage/file_watch.h"
#include "kvstore/storage/store.h"
#include "kvstore/storage/token_ids.h"

namespace carrel::kvstore {
namespace {

int ThreadsOf(const EngineConfig& config) {
  if (config.search_threads > 0) return config.search_threads;
  return UsableCores();
}

int64_t HalfOfMemory() {
  constexpr int64_t kLeast = int64_t{256} << 20;
  return std::max(kLeast, MachineMemoryBytes() / 2);
}

int64_t QuarterOf(int64_t memory_budget_bytes) {
  constexpr int64_t kLeast = int64_t{64} << 20;
  return std::max(kLeast, memory_budget_bytes / 4);
}

bool SameContext(const v1::Manifest& a, const v1::Manifest& b) {
  return a.context_id() == b.context_id() && a.number() == b.number() &&
         a.created_unix_s() == b.created_unix_s() && a.token_ids_sha256() == b.token_ids_sha256();
}

// What is looked for is days old.
constexpr std::chrono::minutes kRemovalEvery{10};

FingerprintFields FieldsOf(const v1::Fingerprint& fingerprint) {
  FingerprintFields fields;
  for (const auto& field : fingerprint.fields()) fields.emplace_back(field.name(), field.value());
  return fields;
}

}  // namespace

Engine::Engine(const EngineConfig& config, std::unique_ptr<Store> store)
    : config_(config),
      store_(std::move(store)),
      requests_(config.request_budget_bytes),
      indexes_(config.memory_budget_bytes),
      resident_(
          config.memory_budget_bytes, [this] { return indexes_.counters().resident_bytes; },
          [this](int64_t bytes) { indexes_.Shed(bytes); }),
      loader_(&resident_),
      queue_(ThreadsOf(config), config.queue_limit),
      checks_(ChecksSource(), config.scrub_bytes_per_s) {}

Engine::~Engine() { stopping_ = true; }

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineConfig& given,
                                                       std::unique_ptr<Store> store) {
  RETURN_IF_ERROR(ValidateEngineConfig(given));
  EngineConfig config = given;
  if (config.memory_budget_bytes == 0) config.memory_budget_bytes = HalfOfMemory();
  if (config.request_budget_bytes == 0) {
    config.request_budget_bytes = QuarterOf(config.memory_budget_bytes);
  }
  CARREL_CHECK(store != nullptr);
  return std::unique_ptr<Engine>(new Engine(config, std::move(store)));
}

BackgroundChecks::Source Engine::ChecksSource() {
  return {.look =
              [this] {
                LookAtOpenContexts();
                RemoveOldImports();
              },
          .names = [this]() -> absl::StatusOr<std::vector<std::string>> {
            std::vector<absl::Status> unreadable;
            ASSIGN_OR_RETURN(const std::vector<v1::Manifest> manifests, store_->List(&unreadable));
            std::vector<std::string> names;
            for (const v1::Manifest& manifest : manifests) names.push_back(manifest.name());
            return names;
          },
          .find = [this](const std::string& name) { return FindStored(name); },
          .busy = [this] { return queue_.waiting() > 0; }};
}

std::vector<std::shared_ptr<OpenContext>> Engine::OpenContexts() {
  std::vector<std::shared_ptr<OpenContext>> open;
  absl::MutexLock lock(&contexts_mu_);
  for (const auto& [name, cached] : contexts_) {
    if (cached.context != nullptr) open.push_back(cached.context);
  }
  return open;
}

void Engine::LookAtOpenContexts() {
  for (const std::shared_ptr<OpenContext>& context : OpenContexts()) {
    const int64_t damaged = FileWatch::total_damaged();
    const absl::StatusOr<int64_t> look = context->LookAtAll();
    if (!look.ok() && FileWatch::total_damaged() > damaged) {
      spdlog::error("data loss: {}", std::string(look.status().message()));
    }
  }
}

void Engine::RemoveOldImports() {
  const auto now = std::chrono::steady_clock::now();
  if (config_.import_age_s == 0 || now < next_removal_) return;
  next_removal_ = now + kRemovalEvery;
  const absl::Duration age = absl::Seconds(config_.import_age_s);
  if (const RemovedUnfinished prefills = store_->RemoveOldUnfinished(age); prefills.prefills > 0) {
    spdlog::info("removed {} unfinished prefills, {} bytes: nobody went on with them for {}",
                 prefills.prefills, prefills.bytes, absl::FormatDuration(age));
  }
  const RemovedRemains removed = store_->RemoveOldImports(age);
  if (removed.imports == 0) return;
  CountImportsRemoved(removed.imports);
  spdlog::info(
      "removed what {} interrupted imports left, {} bytes: nobody went on with them for {}",
      removed.imports, removed.bytes, absl::FormatDuration(age));
}

absl::StatusOr<std::shared_ptr<const StoredContext>> Engine::FindStored(const std::string& name) {
  {
    absl::MutexLock lock(&contexts_mu_);
    const auto it = contexts_.find(name);
    if (it != contexts_.end() && it->second.context != nullptr) {
      return it->second.context->stored();
    }
  }
  return store_->OpenContext(name);
}

Engine::Cached* Engine::Find(const std::string& name) {
  for (;;) {
    const auto it = contexts_.find(name);
    if (it == contexts_.end()) return nullptr;
    if (it->second.context != nullptr) return &it->second;
    contexts_changed_.Wait(&contexts_mu_);
  }
}

absl::Status Engine::MakeRoom() {
  if (static_cast<int64_t>(contexts_.size()) < config_.max_open_contexts) return absl::OkStatus();
  auto oldest = contexts_.end();
  for (auto it = contexts_.begin(); it != contexts_.end(); ++it) {
    if (it->second.context == nullptr || it->second.context->sessions.load() > 0) continue;
    if (oldest == contexts_.end() || it->second.last_use < oldest->second.last_use) oldest = it;
  }
  if (oldest == contexts_.end()) {
    CountRefusal("open_contexts");
    return absl::ResourceExhaustedError(
        absl::StrCat(contexts_.size(),
                     " contexts are in use (max_open_contexts=", config_.max_open_contexts, ")"));
  }
  contexts_.erase(oldest);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<OpenContext>> Engine::OpenStored(const std::string& name) {
  ASSIGN_OR_RETURN(std::shared_ptr<const StoredContext> stored, store_->OpenContext(name));
  return OpenContext::Create(std::move(stored), &indexes_, &resident_, &loader_);
}

absl::StatusOr<std::shared_ptr<OpenContext>> Engine::Enter(const std::string& name) {
  {
    absl::MutexLock lock(&contexts_mu_);
    if (Cached* const found = Find(name); found != nullptr) {
      found->last_use = ++uses_;
      if (found->context->LookAtAll().ok()) {
        found->context->sessions.fetch_add(1);
        return found->context;
      }
      // Its files may be whole again; who has it open keeps what there is of it.
      contexts_.erase(name);
    }
    RETURN_IF_ERROR(Annotate(MakeRoom(), absl::StrCat("open context ", name)));
    contexts_[name] = {nullptr, ++uses_};
  }
  absl::StatusOr<std::shared_ptr<OpenContext>> context =
      CatchThrown("open", [&] { return OpenStored(name); });
  absl::MutexLock lock(&contexts_mu_);
  if (context.ok()) {
    (*context)->sessions.fetch_add(1);
    contexts_[name].context = *context;
  } else {
    contexts_.erase(name);
  }
  contexts_changed_.SignalAll();
  return context;
}

absl::Status Engine::Refresh() {
  ASSIGN_OR_RETURN(const bool changed, store_->Refresh());
  if (!changed) return absl::OkStatus();
  for (const std::shared_ptr<OpenContext>& context : OpenContexts()) {
    const auto manifest = store_->GetManifest(context->name());
    if (manifest.ok() && SameContext(*manifest, context->manifest())) continue;
    // Deleted, or another one has its name: who has it open keeps it.
    absl::MutexLock lock(&contexts_mu_);
    const auto it = contexts_.find(context->name());
    if (it != contexts_.end() && it->second.context == context) contexts_.erase(it);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Session>> Engine::OpenSession(const OpenRequest& request) {
  const std::string attempt = absl::StrCat("open context ", Shown(request.context));
  RETURN_IF_ERROR(Annotate(CheckDeadline(request.deadline), attempt));
  if (sessions_.fetch_add(1) >= config_.max_sessions) {
    sessions_.fetch_sub(1);
    CountRefusal("sessions");
    return absl::ResourceExhaustedError(
        absl::StrCat(attempt, ": ", config_.max_sessions,
                     " sessions are open (max_sessions=", config_.max_sessions, ")"));
  }
  absl::Cleanup uncount = [this] { sessions_.fetch_sub(1); };
  RETURN_IF_ERROR(Annotate(Refresh(), attempt));
  absl::StatusOr<std::shared_ptr<OpenContext>> context = Enter(request.context);
  if (!context.ok()) return context.status();  // names the context
  absl::Cleanup leave = [&context] { (*context)->sessions.fetch_sub(1); };
  RETURN_IF_ERROR(Annotate(
      CheckFingerprint(FieldsOf((*context)->manifest().fingerprint()), request.fingerprint),
      attempt));
  RETURN_IF_ERROR(Annotate(CheckContentId(request.content_id, (*context)->manifest()), attempt));
  ASSIGN_OR_RETURN(const RowRange zone, ZoneOf(**context, request.sink, request.local));
  std::shared_ptr<const OpenContext::QueryDrift> drift;
  if (request.query_drift) {
    absl::StatusOr<std::shared_ptr<const OpenContext::QueryDrift>> read = (*context)->ReadDrift();
    if (!read.ok()) return Annotate(read.status(), attempt);
    drift = *std::move(read);
  }
  std::move(leave).Cancel();
  std::move(uncount).Cancel();
  auto on_close = [this, context = *context] {
    context->sessions.fetch_sub(1);
    sessions_.fetch_sub(1);
  };
  return std::make_shared<Session>(*context, zone, std::move(drift), config_, &queue_, &latencies_,
                                   &requests_, request.tenant, std::move(on_close));
}

v1::StatisticsResponse Engine::Statistics() {
  v1::StatisticsResponse statistics;
  const auto quantiles = [](const Histogram::Summary& summary,
                            v1::StatisticsResponse::Quantiles* wire) {
    wire->set_mean(summary.mean);
    wire->set_p50(summary.p50);
    wire->set_p90(summary.p90);
    wire->set_p99(summary.p99);
    wire->set_max(summary.max);
  };
  for (int i = 0; i < kRequestKinds; ++i) {
    const Histogram::Summary queued = latencies_.queued[i].Summarise();
    if (queued.count == 0) continue;
    v1::StatisticsResponse::Latency* latency = statistics.add_latencies();
    latency->set_kind(kRequestKindNames[i]);
    latency->set_count(queued.count);
    quantiles(queued, latency->mutable_queued());
    quantiles(latencies_.searched[i].Summarise(), latency->mutable_searched());
  }
  const IndexCache::Counters indexes = indexes_.counters();
  statistics.set_index_bytes(indexes.resident_bytes);
  statistics.set_index_loads(indexes.loads);
  statistics.set_index_evictions(indexes.evictions);
  statistics.set_sessions(sessions_.load());
  statistics.set_waiting(queue_.waiting());
  statistics.set_refused(queue_.refused());
  statistics.set_resident_bytes(resident_.ResidentBytes());
  statistics.set_layers_released(resident_.releases());
  statistics.set_layers_loaded(loader_.loads());
  statistics.set_files_changed(FileWatch::total_changes());
  statistics.set_files_damaged(FileWatch::total_damaged());
  const BackgroundChecks::Counters checks = checks_.counters();
  statistics.set_scrubbed_bytes(checks.scrubbed_bytes);
  statistics.set_scrub_passes(checks.passes);
  statistics.set_scrub_failures(checks.failures);
  statistics.set_memory_budget_bytes(config_.memory_budget_bytes);
  absl::MutexLock lock(&contexts_mu_);
  statistics.set_open_contexts(static_cast<int64_t>(contexts_.size()));
  return statistics;
}

absl::StatusOr<std::vector<v1::Manifest>> Engine::List(std::vector<absl::Status>* unreadable) {
  RETURN_IF_ERROR(Refresh());
  return store_->List(unreadable);
}

absl::StatusOr<v1::Manifest> Engine::Get(const std::string& name) {
  RETURN_IF_ERROR(Refresh());
  return store_->GetManifest(name);
}

absl::StatusOr<v1::TokensResponse> Engine::Tokens(const v1::TokensRequest& request) {
  RETURN_IF_ERROR(Refresh());
  ASSIGN_OR_RETURN(const auto stored, FindStored(request.name()));
  const v1::Manifest& manifest = stored->manifest();
  const std::string attempt = absl::StrCat("tokens of context ", request.name());
  RETURN_IF_ERROR(Annotate(CheckContentId(request.content_id(), manifest), attempt));
  if (request.begin() < 0 || request.begin() > manifest.tokens()) {
    return absl::InvalidArgumentError(
        absl::StrCat(attempt, ": begin=", request.begin(), ", must be 0 .. ", manifest.tokens()));
  }
  v1::TokensResponse reply;
  reply.set_content_id(manifest.content_id());
  reply.set_tokens(manifest.tokens());
  reply.set_token_ids_sha256(manifest.token_ids_sha256());
  const int64_t end = std::min(manifest.tokens(), request.begin() + kMostTokens);
  ASSIGN_OR_RETURN(*reply.mutable_token_ids(), ReadTokenIds(*stored, request.begin(), end));
  return reply;
}

absl::Status Engine::Verify(const std::string& name, bool deep, std::function<bool()> cancelled,
                            std::function<void(Verified)> done) {
  if (verifying_.exchange(true)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("verify context ", name, ": another one is being verified"));
  }
  absl::Status accepted = SubmitBackground(
      [this, name, deep, cancelled = std::move(cancelled), done = std::move(done)] {
        const auto verify = [&]() -> Verified {
          ASSIGN_OR_RETURN(const std::shared_ptr<const StoredContext> stored,
                           store_->OpenContext(name));
          ASSIGN_OR_RETURN(VerifyReport report, VerifyContext(*stored, deep, [&] {
                             return stopping_.load() || cancelled();
                           }));
          return std::make_pair(stored->manifest(), std::move(report));
        };
        Verified verified = verify();
        verifying_ = false;
        done(std::move(verified));
      });
  if (!accepted.ok()) verifying_ = false;
  return accepted;
}

bool Engine::IsOpen(const std::string& name) {
  absl::MutexLock lock(&contexts_mu_);
  const auto it = contexts_.find(name);
  if (it == contexts_.end()) return false;
  return it->second.context == nullptr || it->second.context->sessions.load() > 0;
}

absl::Status Engine::Delete(const std::string& name) {
  {
    absl::MutexLock lock(&contexts_mu_);
    if (const Cached* const found = Find(name); found != nullptr) {
      if (const int64_t sessions = found->context->sessions.load(); sessions > 0) {
        return absl::FailedPreconditionError(
            absl::StrCat("delete context ", name, ": ", sessions, " sessions have it open"));
      }
    }
    contexts_[name] = {nullptr, ++uses_};  // who wants to open it waits
  }
  const absl::Status status = store_->Delete(name);
  absl::MutexLock lock(&contexts_mu_);
  contexts_.erase(name);
  contexts_changed_.SignalAll();
  return status.ok() || absl::StrContains(status.message(), name)
             ? status
             : Annotate(status, absl::StrCat("delete context ", Shown(name)));
}

}  // namespace carrel::kvstore
