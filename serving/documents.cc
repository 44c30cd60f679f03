#include "serving/documents.h"

#include <spdlog/spdlog.h>

#include <atomic>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "carrel/prefill.h"
#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "common/thrown.h"
#include "kvstore/access/kept_name.h"
#include "kvstore/format/context_name.h"
#include "kvstore/service/context_client.h"
#include "library/handles.h"
#include "library/status.h"
#include "serving/document_jobs.h"
#include "serving/known_contexts.h"
#include "serving/prefix_cache.h"
#include "serving/status_details.h"
#include "serving/still_allowed.h"
#include "serving/waiting_documents.h"

namespace carrel::serving {
namespace {

constexpr char kUnnamed[] = "doc-";
constexpr size_t kMaxFailed = 64;  // whose errors are remembered
// How old a look at a store may be that others write to.
constexpr absl::Duration kLookAgain = absl::Seconds(1);

class PrefillingDocuments final : public Documents {
 public:
  PrefillingDocuments(DocumentsConfig config, std::shared_ptr<library::LoadedModel> model,
                      std::shared_ptr<library::StoreAccess> store, Scheduler* scheduler)
      : config_(std::move(config)),
        model_(std::move(model)),
        store_(std::move(store)),
        scheduler_(scheduler),
        prefixes_(scheduler->prefixes()),
        model_handle_(model_),
        store_handle_(config_.address, store_),
        waiting_(config_.address.folder),
        known_(&prefixes_) {}

  // Goes on with what another process left, and takes in more from now on.
  absl::Status Begin() {
    if (!config_.writable) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::vector<WaitingDocuments::Found> left, waiting_.Read());
    for (const WaitingDocuments::Found& one : left) RETURN_IF_ERROR(GoOn(one));
    RETURN_IF_ERROR(Sweep());
    thread_ = std::thread([this] { Work(); });
    clock_.emplace();
    clock_->Watch([this] {
      CatchThrown("documents", [this] {
        Look();
        return absl::OkStatus();
      }).IgnoreError();  // the next look may go better
      return !stopping_;
    });
    return absl::OkStatus();
  }

  ~PrefillingDocuments() override {
    stopping_ = true;
    clock_.reset();
    {
      absl::MutexLock lock(&mu_);  // whoever waits looks again
    }
    if (thread_.joinable()) thread_.join();
    absl::MutexLock lock(&mu_);
    for (const auto& [name, job] : jobs_.all()) {
      if (!job->failed()) job->Fail(absl::UnavailableError("the server is stopping"));
    }
  }

  // Reads what the store has that is not known yet.
  absl::Status Refresh() {
    absl::MutexLock one(&refresh_mu_);
    const absl::Time now = SteadyNow();
    ASSIGN_OR_RETURN(const auto client, store_->NewContextClient());
    ASSIGN_OR_RETURN(const v1::ListResponse listed, client->List());
    KnownContexts::ByName stored;
    for (const auto& summary : listed.contexts()) {
      KnownContext& entry = stored[summary.name()];
      {
        absl::MutexLock lock(&mu_);
        const KnownContext* const known = known_.Find(summary.name());
        if (known != nullptr && known->document.content_id == summary.content_id() &&
            known->document.resident == !summary.elsewhere()) {
          entry = *known;
          continue;
        }
      }
      ASSIGN_OR_RETURN(ReadContext read,
                       ReadContext::From(summary, *client, *store_, model_->checkpoint(),
                                         config_.retrieval, config_.derived_weights));
      entry = std::move(read.known);
      absl::MutexLock lock(&mu_);
      if (read.tokens.has_value()) prefixes_.AddDocument(entry.document.content_id, *read.tokens);
    }
    absl::MutexLock lock(&mu_);
    if (const auto going = current_ != nullptr && current_->cancelled
                               ? stored.find(current_->document.name)
                               : stored.end();
        going != stored.end()) {
      prefixes_.RemoveDocument(going->second.document.content_id);
      stored.erase(going);
    }
    known_.Replace(std::move(stored));
    looked_ = now;
    return absl::OkStatus();
  }

  // For clients that only look. What is resident in a store that brings contexts changes by itself.
  absl::Status RefreshIfOld() {
    if (store_->brings()) return Refresh();
    {
      absl::MutexLock lock(&mu_);
      if (SteadyNow() - looked_ < kLookAgain) return absl::OkStatus();
    }
    return Refresh();
  }

  absl::StatusOr<std::vector<Document>> List() override {
    RETURN_IF_ERROR(RefreshIfOld());
    absl::MutexLock lock(&mu_);
    std::map<std::string, Document> all;
    for (const auto& [name, entry] : known_.all()) all[name] = entry.document;
    for (const auto& [name, job] : jobs_.all()) all[name] = job->document;
    std::vector<Document> documents;
    for (auto& [name, document] : all) documents.push_back(std::move(document));
    return documents;
  }

  absl::StatusOr<Document> Get(const std::string& name) override {
    RETURN_IF_ERROR(RefreshIfOld());
    {
      absl::MutexLock lock(&mu_);
      absl::StatusOr<Document> found = FindLocked(name);
      if (found.ok()) return found;
    }
    RETURN_IF_ERROR(Refresh());  // another process may have published it just now
    absl::MutexLock lock(&mu_);
    return FindLocked(name);
  }

  absl::StatusOr<Added> Add(const std::string& name, std::vector<TokenId> tokens,
                            Bringer by) override {
    return Enqueue(name, /*waits=*/true, std::move(tokens), std::move(by));
  }

  absl::StatusOr<std::shared_ptr<void>> TakePlace(const Sees& counted, const Take& take) override {
    RETURN_IF_ERROR(Refresh());
    absl::MutexLock lock(&mu_);
    int64_t contexts = 0, bytes = 0;
    for (const auto& [name, entry] : known_.all()) {
      if (!counted(name)) continue;
      ++contexts;
      bytes += entry.document.bytes;
    }
    for (const auto& [name, job] : jobs_.all()) {
      const bool counts = job->place == nullptr && known_.Find(name) == nullptr &&
                          job->document.state != DocumentState::kFailed && counted(name);
      if (!counts) continue;
      ++contexts;
      bytes += ExpectedBytes(model_->checkpoint().config, job->document.tokens);
    }
    return take(contexts, bytes);
  }

  absl::Status Delete(const std::string& name) override {
    RETURN_IF_ERROR(CheckWritable());
    {
      absl::MutexLock waiting(&waiting_mu_);
      absl::MutexLock lock(&mu_);
      if (const Job job = jobs_.Find(name)) {
        RETURN_IF_ERROR(waiting_.Remove(name));  // or it would come back
        return CancelLocked(*job, absl::CancelledError("cancelled"));
      }
    }
    RETURN_IF_ERROR(DeleteStored(name));
    return Refresh();
  }

  absl::Status Watch(const std::string& name, Watcher watcher) override {
    absl::MutexLock lock(&mu_);
    ASSIGN_OR_RETURN(const Document document, FindLocked(name));
    const bool more = watcher(document);
    const Job job = jobs_.Find(name);
    if (more && job != nullptr) job->watchers.push_back(std::move(watcher));
    return absl::OkStatus();
  }

  std::optional<Recognised> Recognise(absl::Span<const TokenId> prompt, int64_t most_given_up,
                                      const Sees& sees) override {
    if (!config_.writable && !RefreshIfOld().ok()) return std::nullopt;
    std::vector<std::pair<std::string, std::string>> candidates;
    {
      absl::MutexLock lock(&mu_);
      candidates = known_.Candidates(prompt);
    }
    for (auto& [name, content_id] : candidates) {
      if (!sees(name)) continue;
      const auto tokens = store_->DocumentTokens(name, content_id);
      if (!tokens.ok()) continue;  // it is gone, or damaged: who asks for it by name is told
      auto rest = RestOf(prompt, *tokens, most_given_up);
      if (!rest.has_value()) continue;
      absl::MutexLock lock(&mu_);
      known_.Use(name);
      return Recognised{std::move(name), std::move(content_id), *std::move(rest)};
    }
    return std::nullopt;
  }

  absl::StatusOr<Added> Keep(const std::string& name, std::vector<TokenId> tokens,
                             Bringer by) override {
    RETURN_IF_ERROR(CheckLength(tokens));
    RETURN_IF_ERROR(Refresh());
    absl::MutexLock keeping(&keep_mu_);
    {
      absl::MutexLock lock(&mu_);
      const auto same = SameLocked(DigestOf(tokens), "", by.sees);
      if (same.has_value()) return Added{*same, /*existed=*/true};
      if (KeptLocked(name).on_their_way >= config_.keep) {
        return absl::ResourceExhaustedError("as many are being kept as may");
      }
    }
    // Nothing that was kept goes before it is certain that this one is taken.
    ASSIGN_OR_RETURN(Added added, Enqueue(name, /*waits=*/false, std::move(tokens), std::move(by)));
    if (added.existed) return added;
    const absl::Status room = MakeRoom(name);
    if (room.ok()) return added;
    Delete(name).IgnoreError();
    return room;
  }

  int64_t queued() const override {
    absl::MutexLock lock(&mu_);
    return jobs_.waiting();
  }

 private:
  using Job = DocumentJobs::Job;

  absl::Status CheckWritable() const {
    if (config_.writable) return absl::OkStatus();
    if (!config_.why_not_writable.empty()) {
      return absl::FailedPreconditionError(config_.why_not_writable);
    }
    return absl::FailedPreconditionError(
        "documents are taken in and deleted by a process that has the store to itself: "
        "carrel api --store FOLDER, without --read-only");
  }

  absl::StatusOr<Document> FindLocked(const std::string& name) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (const Job job = jobs_.Find(name)) return job->document;
    if (const KnownContext* const entry = known_.Find(name)) return entry->document;
    return absl::NotFoundError(absl::StrCat("no context \"", name, "\""));
  }

  // The same document, ready or on its way.
  std::optional<Document> SameLocked(const std::string& digest, const std::string& name,
                                     const Sees& sees) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::optional<Document> found;
    const auto look = [&](const std::string& its_digest, const Document& document) {
      if (its_digest != digest || !document.usable || !sees(document.name)) return;
      if (!found.has_value() || document.name == name) found = document;
    };
    for (const auto& [key, job] : jobs_.all()) {
      if (!job->failed()) look(job->digest, job->document);
    }
    for (const auto& [key, entry] : known_.all()) look(entry.digest, entry.document);
    return found;
  }

  absl::Status CheckLength(const std::vector<TokenId>& tokens) const {
    return CheckDocumentLength(model_->checkpoint().config, tokens);
  }

  // What another process left waiting. What cannot go on has failed, and says why.
  absl::Status GoOn(const WaitingDocuments::Found& found) {
    auto job = std::make_shared<DocumentJob>();
    job->document = {.name = found.name, .index = config_.index};
    job->waits = true;
    absl::Status good = found.document.status();
    if (good.ok() && config_.still_may != nullptr && !found.document->who.empty()) {
      job->still = [may = config_.still_may, who = found.document->who, name = found.name] {
        return may(who, name);
      };
      if (const absl::Status still = job->still(); !still.ok()) {
        LogWithdrawn(found.name, still);
        RETURN_IF_ERROR(waiting_.Remove(found.name));
        return library::FromPublic(DiscardPrefill(store_handle_, found.name));
      }
    }
    if (good.ok()) {
      job->tokens = found.document->tokens;
      job->digest = DigestOf(job->tokens);
      job->document.tokens = static_cast<int64_t>(job->tokens.size());
      job->document.created_unix_s = found.document->created_unix_s;
      good = CheckLength(job->tokens);
      if (found.document->fingerprint != model_->checkpoint().fingerprint) {
        good = absl::FailedPreconditionError(
            "it was brought under another model than the one that is served now: delete it, or "
            "bring it again");
      }
    }
    absl::MutexLock lock(&mu_);
    const KnownContext* const entry = known_.Find(found.name);
    if (good.ok() && entry != nullptr && entry->digest == job->digest) {
      return waiting_.Remove(found.name);  // published, as the process ended
    }
    if (good.ok() && entry != nullptr) {
      good = absl::AlreadyExistsError(
          absl::StrCat("name=", found.name, " is another document's by now"));
    }
    if (!good.ok()) job->Fail(good);
    jobs_.Add(job);
    return absl::OkStatus();
  }

  // Prefills of this store that ended in the middle. What was kept unasked, or is published by now, goes;
  // others are listed: they may be somebody's who goes on with them.
  absl::Status Sweep() {
    if (store_->store() == nullptr) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::vector<kvstore::UnfinishedPrefill> left,
                     store_->store()->ListUnfinished());
    for (const kvstore::UnfinishedPrefill& one : left) {
      if (one.running) continue;
      const std::string& name = one.name;
      bool discard = kvstore::IsKept(name);
      {
        absl::MutexLock lock(&mu_);
        const Job job = jobs_.Find(name);
        if (job != nullptr && !job->failed()) continue;
        discard |= job != nullptr || known_.Find(name) != nullptr;
        if (!discard) {
          const auto failed = std::make_shared<DocumentJob>();
          failed->document = {.name = name, .index = config_.index};
          failed->Fail(absl::FailedPreconditionError(
              "a prefill that did not end: carrel prefill with the same name and text goes "
              "on with it, while no server has the store; or delete it"));
          jobs_.Add(failed);
        }
      }
      if (discard) RETURN_IF_ERROR(library::FromPublic(DiscardPrefill(store_handle_, name)));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Added> Enqueue(std::string name, bool waits, std::vector<TokenId> tokens,
                                Bringer by) {
    RETURN_IF_ERROR(CheckWritable());
    RETURN_IF_ERROR(CheckLength(tokens));
    auto job = std::make_shared<DocumentJob>();
    job->digest = DigestOf(tokens);
    const bool named = !name.empty();
    if (!named) name = absl::StrCat(kUnnamed, job->digest.substr(0, 12));
    RETURN_IF_ERROR(WithParam(kvstore::ValidateContextName(name), "name"));
    RETURN_IF_ERROR(Refresh());
    absl::MutexLock waiting(&waiting_mu_);
    {
      absl::MutexLock lock(&mu_);
      ASSIGN_OR_RETURN(const std::optional<Document> same,
                       CheckPlaceLocked(name, named, job->digest, by.sees));
      if (same.has_value()) return Added{*same, /*existed=*/true};
    }
    job->document = {.name = name,
                     .tokens = static_cast<int64_t>(tokens.size()),
                     .index = config_.index,
                     .created_unix_s = absl::ToUnixSeconds(absl::Now())};
    job->tokens = std::move(tokens);
    job->place = std::move(by.place);
    job->waits = waits;
    if (by.still != nullptr) {
      job->still = [still = std::move(by.still), name] { return still(name); };
    }
    if (job->waits) {
      RETURN_IF_ERROR(OfMachine(waiting_.Put({.name = name,
                                              .who = std::move(by.who),
                                              .tokens = job->tokens,
                                              .fingerprint = model_->checkpoint().fingerprint,
                                              .created_unix_s = job->document.created_unix_s})));
    }
    absl::MutexLock lock(&mu_);
    jobs_.Add(job);
    return Added{job->document};
  }

  // The same document, if it is there; else whether there is room for it under this name.
  absl::StatusOr<std::optional<Document>> CheckPlaceLocked(const std::string& name, bool named,
                                                           const std::string& digest,
                                                           const Sees& sees) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (auto same = SameLocked(digest, name, sees); same.has_value()) {
      if (!named || same->name == name) return same;
      return WithCode(
          WithParam(absl::AlreadyExistsError(absl::StrCat(
                        "name=", name, ": the same text is context \"", same->name,
                        "\" already: ask that one, or delete it first; it is read once")),
                    "name"),
          "context_exists");
    }
    const Job there = jobs_.Find(name);
    if (known_.Find(name) != nullptr || (there != nullptr && !there->failed())) {
      return AnotherDocuments(name);
    }
    if (jobs_.waiting() >= config_.max_queued) {
      return WithRetryAfter(
          absl::ResourceExhaustedError(absl::StrCat(
              jobs_.waiting(), " documents wait for prefill already; come again later")),
          absl::Seconds(10));
    }
    return std::nullopt;
  }

  // Contexts that were kept unasked for the keeper of this one, which is among them.
  struct Kept {
    int64_t on_their_way = 0, stored = 0;
    std::string oldest;  // stored, and used longest ago
  };
  Kept KeptLocked(const std::string& kept_name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Kept kept;
    absl::Time used = absl::InfiniteFuture();
    for (const auto& [name, job] : jobs_.all())
      kept.on_their_way += kvstore::SameKeeper(name, kept_name);
    for (const auto& [name, entry] : known_.all()) {
      if (!kvstore::SameKeeper(name, kept_name) || jobs_.Find(name) != nullptr) continue;
      ++kept.stored;
      if (entry.used < used) {
        used = entry.used;
        kept.oldest = name;
      }
    }
    return kept;
  }

  // No more are left than may be.
  absl::Status MakeRoom(const std::string& kept_name) {
    for (;;) {
      Kept kept;
      {
        absl::MutexLock lock(&mu_);
        kept = KeptLocked(kept_name);
      }
      if (kept.on_their_way + kept.stored <= config_.keep) return absl::OkStatus();
      if (kept.oldest.empty()) {
        return absl::ResourceExhaustedError("as many are being kept as may");
      }
      RETURN_IF_ERROR(DeleteStored(kept.oldest));
      RETURN_IF_ERROR(Refresh());
    }
  }

  absl::Status DeleteStored(const std::string& name) {
    RETURN_IF_ERROR(scheduler_->Close(name));
    ASSIGN_OR_RETURN(const auto client, store_->NewContextClient());
    // A session that was just closed may not be gone yet.
    const absl::Time until = SteadyNow() + absl::Seconds(2);
    for (;;) {
      absl::Status deleted = client->Delete(name);
      if (!absl::IsFailedPrecondition(deleted) || SteadyNow() > until) return deleted;
      absl::SleepFor(absl::Milliseconds(20));
    }
  }

  // The job, which is listed, is there no more; nor what there is of it, wherever it had come to.
  absl::Status CancelLocked(DocumentJob& job, const absl::Status& error)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const std::string name = job.document.name;
    job.cancelled = true;  // the thread that prefills it discards what there is,
    known_.Remove(name);   // be it published
    job.place = nullptr;
    if (!job.failed()) {
      job.Fail(error);
      CountDocument("cancelled");
    }
    jobs_.Remove(name);  // with its own share of the job
    if (current_ != nullptr && current_->document.name == name) return absl::OkStatus();
    return library::FromPublic(DiscardPrefill(store_handle_, name));
  }

  // Twice a second. What its bringer may have made no more ends; who waits is told, for watchers look at the clock.
  void Look() {
    std::vector<Job> brought;
    {
      absl::MutexLock lock(&mu_);
      for (const auto& [name, job] : jobs_.all()) {
        if (job->failed()) continue;
        job->Tell();
        if (job->still != nullptr) brought.push_back(job);
      }
    }
    for (const Job& job : brought) {
      if (const absl::Status still = job->still(); !still.ok()) Withdraw(job, still);
    }
  }

  void Withdraw(const Job& job, const absl::Status& why) {
    const std::string& name = job->document.name;
    absl::MutexLock waiting(&waiting_mu_);
    absl::MutexLock lock(&mu_);
    if (jobs_.Find(name) != job || job->failed()) return;  // it is over
    LogWithdrawn(name, why);
    // A file that stays is looked at when it comes back.
    absl::Status gone = waiting_.Remove(name);
    gone.Update(CancelLocked(
        *job, absl::FailedPreconditionError(absl::StrCat(
                  "context \"", name, "\": the key that brought it may not bring it any more"))));
    if (!gone.ok()) spdlog::warn("document {}: {}", name, std::string(gone.message()));
  }

  static void LogWithdrawn(const std::string& name, const absl::Status& why) {
    spdlog::warn("document {}: given up: {}", name, std::string(why.message()));
  }

  void Work() {
    for (;;) {
      Job job;
      {
        absl::MutexLock lock(&mu_);
        const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
          return stopping_ || jobs_.waiting() > 0;
        };
        mu_.Await(absl::Condition(&ready));
        if (stopping_) return;
        job = current_ = jobs_.Next();
        job->Tell();
      }
      const absl::Status status =
          OfMachine(CatchThrown("a document", [&] { return PrefillOne(*job); }));
      if (!status.ok() && !stopping_ && !job->published) Discard(*job);  // it leaves nothing behind
      Forget(*job, status);
      {
        absl::MutexLock lock(&mu_);
        if (!job->cancelled) {
          current_ = nullptr;
          End(*job, status);
          continue;
        }
      }
      Discard(*job);
      absl::MutexLock one(&refresh_mu_);  // whoever looks now may have listed it
      absl::MutexLock lock(&mu_);
      current_ = nullptr;
    }
  }

  // Its file goes once it is ready, becomes its error if it has failed, and stays where the process ends in
  // between. Who cancelled it has removed the file, and another may have the name.
  void Forget(const DocumentJob& job, const absl::Status& status) {
    absl::MutexLock waiting(&waiting_mu_);
    if (!job.waits || job.cancelled || (stopping_ && !job.published)) return;
    // One that stays although it was published goes at the next start.
    const absl::Status done = status.ok() ? waiting_.Remove(job.document.name)
                                          : waiting_.PutFailure(job.document.name, status);
    if (!done.ok()) spdlog::warn("document {}: {}", job.document.name, std::string(done.message()));
  }

  // What was cancelled goes, wherever it had come to; nobody sees it meanwhile.
  void Discard(const DocumentJob& job) {
    if (!job.published) {
      (void)DiscardPrefill(store_handle_, job.document.name);
      return;
    }
    // Somebody may have been answered from it before it was cancelled.
    while (absl::IsFailedPrecondition(DeleteStored(job.document.name)) && !stopping_) {
      absl::SleepFor(absl::Milliseconds(100));
    }
  }

  absl::Status PrefillOne(DocumentJob& job) {
    PrefillOptions options;
    options.index = config_.index;
    options.device = config_.on_gpu ? Device::kCuda : Device::kCpu;
    options.progress = [&](double share, const std::string& where) {
      absl::MutexLock lock(&mu_);
      if (job.cancelled) return;
      job.document.progress = share;
      job.document.where = where;
      job.Tell();
    };
    options.wanted = [&] { return !job.cancelled && !stopping_; };
    if (config_.probe != nullptr) options.probe = config_.probe(job.tokens);
    const std::string name = job.document.name;
    auto run = [&] { return Prefill(model_handle_, job.tokens, store_handle_, name, options); };
    Result<PrefillReport> report = run();
    if (report.status().code() == StatusCode::kFailedPrecondition && options.wanted()) {
      options.restart = true;  // what lay there under the name was another document's
      report = run();
    }
    RETURN_IF_ERROR(library::FromPublic(report.status()));
    job.published = true;
    return job.cancelled ? absl::OkStatus() : Refresh();
  }

  void End(DocumentJob& job, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    job.tokens = {};
    const std::string name = job.document.name;
    CountDocument(status.ok() ? "ready" : "failed");
    job.place = nullptr;  // it is listed, or there is none
    if (!status.ok()) {
      if (!stopping_) spdlog::error("document {}: {}", name, std::string(status.message()));
      job.Fail(stopping_ ? absl::UnavailableError("the server is stopping") : status);
      if (!job.waits) jobs_.Remove(name);  // nobody asked for it
      for (const std::string& dropped : jobs_.DropFailures(kMaxFailed)) {
        waiting_.Remove(dropped).IgnoreError();  // its error
      }
      return;
    }
    known_.Use(name);
    if (const KnownContext* const entry = known_.Find(name)) job.document = entry->document;
    job.Tell();
    jobs_.Remove(name);
  }

  const DocumentsConfig config_;
  const std::shared_ptr<library::LoadedModel> model_;
  const std::shared_ptr<library::StoreAccess> store_;
  Scheduler* const scheduler_;
  PrefixCache& prefixes_;
  library::ModelHandle model_handle_;
  library::StoreHandle store_handle_;
  std::atomic<bool> stopping_{false};
  const WaitingDocuments waiting_;
  absl::Mutex keep_mu_ ABSL_ACQUIRED_BEFORE(waiting_mu_);  // one is kept at a time
  absl::Mutex waiting_mu_ ABSL_ACQUIRED_BEFORE(mu_);       // held where files of `waiting_` change
  absl::Mutex refresh_mu_ ABSL_ACQUIRED_BEFORE(mu_);       // one look at the store at a time
  mutable absl::Mutex mu_;
  KnownContexts known_ ABSL_GUARDED_BY(mu_);
  DocumentJobs jobs_ ABSL_GUARDED_BY(mu_);  // not ready
  Job current_ ABSL_GUARDED_BY(mu_);
  absl::Time looked_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  std::thread thread_;
  std::optional<StillAllowed> clock_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Documents>> Documents::Create(
    const DocumentsConfig& config, std::shared_ptr<library::LoadedModel> model,
    std::shared_ptr<library::StoreAccess> store, Scheduler* scheduler) {
  auto documents =
      std::make_unique<PrefillingDocuments>(config, std::move(model), std::move(store), scheduler);
  const absl::Status looked = documents->Refresh();
  if (!looked.ok() && config.address.server.empty()) return looked;  // a server may come later
  RETURN_IF_ERROR(documents->Begin());
  return documents;
}

}  // namespace carrel::serving
