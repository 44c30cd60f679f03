#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/file.h"
#include "common/status.h"
#include "http_api/api_service.h"
#include "kvstore/access/access.h"
#include "kvstore/access/audit_log.h"
#include "kvstore/engine/engine.h"
#include "kvstore/replica/residence_metrics.h"
#include "serving/jobs/job_follower.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/config_file.h"
#include "tools/carrel/job_flags.h"
#include "tools/carrel/replica_flags.h"
#include "tools/carrel/retrieval_flags.h"
#include "tools/carrel/signal_pipe.h"

namespace carrel::tools {
namespace {

struct ApiFlags {
  RetrievalFlags retrieval;
  ReplicaFlags replica;
  JobFlags jobs;  // --jobs is its bucket, reached as --remote's is
  http_api::ApiConfig config;
  std::string keys, audit_log;
  bool read_only = false, open_page = false, anyone_may_write = false;
  std::string idle_after = "60s";
};

// A folder is this process's alone, as of serve, unless it only reads.
absl::StatusOr<std::shared_ptr<library::StoreAccess>> OpenFor(const ApiFlags& flags) {
  const StoreFlags& store = flags.retrieval.store;
  if (store.folder.empty() && store.server.empty()) return nullptr;
  if (!flags.config.engine.documents->writable && !flags.replica.given())
    return OpenStore(flags.retrieval);
  absl::StatusOr<std::shared_ptr<library::StoreAccess>> opened =
      library::StoreAccess::Open(store, kvstore::StoreMode::kReadWrite);
  if (opened.ok()) return opened;
  if (flags.replica.given()) return Annotate(opened.status(), "--cache");
  return Annotate(opened.status(), "--store (with --read-only it is only read)");
}

// The service, for who makes room among the contexts that it answers from: there is none before it has started, nor
// once it is to end.
class ServiceInUse {
 public:
  void Set(http_api::ApiService* service) {
    absl::MutexLock lock(&mu_);
    service_ = service;
  }
  bool Reads(const std::string& context) const {
    absl::ReaderMutexLock lock(&mu_);
    return service_ != nullptr && service_->Reads(context);
  }
  absl::Status LetGo(const std::string& context) const {
    absl::ReaderMutexLock lock(&mu_);
    return service_ == nullptr ? absl::OkStatus() : service_->LetGo(context);
  }

 private:
  mutable absl::Mutex mu_;
  http_api::ApiService* service_ ABSL_GUARDED_BY(mu_) = nullptr;
};

// A context whose decoders are idle may go for another; one that is read may not.
kvstore::ResidenceTarget TargetOf(kvstore::Engine& engine, const ServiceInUse& service) {
  kvstore::ResidenceTarget target = kvstore::TargetOf(engine);
  target.is_open = [&service](const std::string& name) { return service.Reads(name); };
  target.remove = [&engine, &service](const std::string& name) -> absl::Status {
    RETURN_IF_ERROR(service.LetGo(name));
    // A session that was just closed may not be gone yet.
    for (int attempt = 0;; ++attempt) {
      const absl::Status deleted = engine.Delete(name);
      if (!absl::IsFailedPrecondition(deleted) || attempt == 50) return deleted;
      absl::SleepFor(absl::Milliseconds(20));
    }
  };
  return target;
}

// Who may do what here.
struct Door {
  std::shared_ptr<kvstore::Access> access;
  std::unique_ptr<kvstore::AuditLog> audit;  // null: none
  std::string token;                         // empty: there are keys, or anyone may write
  std::string token_file;                    // empty: none
};

// The token changes with every start. Its file is its owner's alone, and beside the store: who may read that may write.
absl::StatusOr<Door> OpenDoor(const ApiFlags& flags) {
  Door door;
  if (!flags.audit_log.empty()) {
    ASSIGN_OR_RETURN(door.audit, kvstore::AuditLog::Open(flags.audit_log));
  }
  if (!flags.keys.empty()) {
    if (flags.anyone_may_write) {
      return absl::InvalidArgumentError(
          "--anyone-may-add-and-delete: --keys says already who may do what");
    }
    ASSIGN_OR_RETURN(door.access, kvstore::Access::Create(flags.keys));
    return door;
  }
  if (flags.anyone_may_write) {
    door.access = kvstore::Access::Open(/*everything=*/true);
    return door;
  }
  door.token = kvstore::NewAccessKey();
  door.access = kvstore::Access::OpenWithToken(door.token);
  if (flags.config.engine.documents->writable) {
    door.token_file = absl::StrCat(flags.retrieval.store.folder, ".token");
    RETURN_IF_ERROR(WritePrivateFile(door.token_file, absl::StrCat(door.token, "\n")));
  }
  return door;
}

// Says where it listens and who may do what. The page's address; empty: there is none for a browser.
std::string Announce(const ApiFlags& flags, const Door& door, const http_api::ApiService& service) {
  std::string page;
  for (const std::string& address : service.addresses()) {
    if (absl::StartsWith(address, "unix:")) {
      absl::FPrintF(stderr, "carrel api: on %s: who may open the socket may do everything\n",
                    address);
      continue;
    }
    absl::FPrintF(stderr, "carrel api: model %s on http://%s/v1\n", flags.config.model_name,
                  address);
    if (page.empty()) {
      page = absl::StrCat("http://", address, "/", door.token.empty() ? "" : "#token=", door.token);
    }
  }
  if (!page.empty()) absl::FPrintF(stderr, "carrel api: a page for people on %s\n", page);
  if (!flags.keys.empty()) {
    absl::FPrintF(stderr, "carrel api: who may do what: %s\n", flags.keys);
  } else if (flags.anyone_may_write) {
    absl::FPrintF(stderr,
                  "carrel api: ANYBODY who reaches the address may ask, add and DELETE documents "
                  "(--anyone-may-add-and-delete)\n");
  } else {
    absl::FPrintF(
        stderr,
        "carrel api: anybody who reaches the address may list and ask; adding and deleting "
        "need the token%s%s\n",
        door.token_file.empty() ? "" : ", which is also in ", door.token_file);
  }
  return page;
}

// As a desktop opens addresses; where there is none, the terminal says it.
void OpenInBrowser(const std::string& page) {
  const pid_t child = fork();
  if (child != 0) return;
  if (const int null = open("/dev/null", O_RDWR); null >= 0) {
    for (const int fd : {0, 1, 2}) dup2(null, fd);
  }
  execlp("xdg-open", "xdg-open", page.c_str(), nullptr);
  _exit(127);
}

// SIGHUP: as of serve, a log that was renamed is begun anew, and the keys are read at once.
void ReadAgain(const Door& door) {
  if (door.audit != nullptr) {
    if (const absl::Status status = door.audit->Reopen(); !status.ok()) {
      absl::FPrintF(stderr, "carrel api: SIGHUP: %s; lines go on to where they went\n",
                    status.message());
    }
  }
  door.access->Reload().IgnoreError();  // it logs
}

// Who follows the jobs that documents become; without --jobs they are prefilled here.
absl::Status OpenJobs(ApiFlags& flags) {
  if (flags.jobs.remote.empty()) return absl::OkStatus();
  flags.jobs.bucket = flags.replica.bucket;
  RETURN_IF_ERROR(Annotate(flags.jobs.Validate(), "--jobs"));
  if (flags.retrieval.store.server.empty() && !flags.replica.given()) {
    return absl::InvalidArgumentError(
        "--jobs has workers prefill documents into a bucket: it needs --remote, or --server, a "
        "server that has the bucket's contexts (carrel serve --remote)");
  }
  if (flags.replica.given() && flags.replica.remote != flags.jobs.remote) {
    return absl::InvalidArgumentError(
        absl::StrCat("--jobs ", flags.jobs.remote, " and --remote ", flags.replica.remote,
                     ": what becomes of documents would not be here"));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Bucket> bucket, flags.jobs.Open(kSoon));
  ASSIGN_OR_RETURN(std::unique_ptr<serving::Doorbell> doorbell,
                   flags.jobs.Doorbell(/*listen=*/false));
  flags.config.jobs =
      std::make_shared<serving::JobFollower>(std::move(bucket), std::move(doorbell));
  return absl::OkStatus();
}

// Flags into the service's configuration; who may do what comes with the door.
absl::Status Resolve(ApiFlags& flags) {
  RetrievalFlags& retrieval = flags.retrieval;
  if (retrieval.model_dir.empty()) return absl::InvalidArgumentError("api: --model is required");
  if (flags.replica.given() && !retrieval.store.server.empty()) {
    return absl::InvalidArgumentError("--server and --remote: contexts lie there or come here");
  }
  ReplicaFlags replica = flags.replica;
  if (!flags.jobs.remote.empty() && !replica.given())
    replica.bucket = {};  // they are those of --jobs
  RETURN_IF_ERROR(replica.Resolve(flags.read_only, retrieval.store.folder));
  const bool stored = !retrieval.store.folder.empty() || !retrieval.store.server.empty();
  RETURN_IF_ERROR(retrieval.ResolveFor(stored));
  http_api::ApiConfig& config = flags.config;
  if (config.model_name.empty()) {
    config.model_name =
        std::filesystem::path(retrieval.model_dir).lexically_normal().stem().string();
  }
  config.engine.documents->writable =
      !retrieval.store.folder.empty() && !flags.read_only && !flags.replica.given();
  if (flags.replica.given()) {
    config.engine.documents->why_not_writable = absl::StrCat(
        "the contexts here are those of ", flags.replica.remote,
        ": carrel prefill --store s3://.. and carrel push bring one there, carrel rm removes it");
  }
  absl::Duration& idle = config.engine.scheduler.conversations.idle;
  if (!absl::ParseDuration(flags.idle_after, &idle) || idle < absl::Seconds(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("idle-after=", flags.idle_after, " is no duration of 1s or more"));
  }
  config.engine.scheduler.decoders = DecoderSpecOf(retrieval);
  config.engine.documents->address = retrieval.store;
  config.engine.documents->on_gpu = retrieval.device_config.device == model::Device::kCuda;
  if (config.engine.documents->keep > 0 && !config.engine.documents->writable) {
    return absl::InvalidArgumentError(
        "--keep-documents needs --store, without --read-only: that is where they are kept");
  }
  return absl::OkStatus();
}

// Until a signal ends it. residence: null: contexts come from nowhere.
absl::Status Serve(const ApiFlags& flags, const Door& door, const SignalPipe& signals,
                   std::shared_ptr<library::LoadedModel> model,
                   std::shared_ptr<library::StoreAccess> store, kvstore::Residence* residence,
                   ServiceInUse& in_use) {
  http_api::ApiConfig config = flags.config;
  config.access = door.access;
  config.audit = door.audit.get();
  config.token_file = door.token_file;
  const std::unique_ptr<kvstore::Warming> warming = flags.replica.StartWarming(residence, nullptr);
  if (warming != nullptr) config.ready = [&warming] { return warming->ready(); };
  if (residence != nullptr) {
    config.more_metrics = [residence] {
      return kvstore::ResidenceMetrics(residence->Statistics());
    };
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<http_api::ApiService> service,
                   http_api::ApiService::Start(config, std::move(model), std::move(store)));
  in_use.Set(service.get());
  const auto let_go = absl::MakeCleanup([&in_use] { in_use.Set(nullptr); });
  const std::string page = Announce(flags, door, *service);
  if (flags.open_page && !page.empty()) OpenInBrowser(page);
  int signal = signals.Wait();
  for (; signal == SIGHUP; signal = signals.Wait()) ReadAgain(door);
  absl::FPrintF(stderr, "carrel api: %s: stopping\n", strsignal(signal));
  if (residence != nullptr) residence->End();  // nobody waits for a bucket any more
  return absl::OkStatus();
}

absl::Status RunApi(ApiFlags& flags) {
  const RetrievalFlags& retrieval = flags.retrieval;
  RETURN_IF_ERROR(Resolve(flags));
  ASSIGN_OR_RETURN(Door door, OpenDoor(flags));
  // A terminal that is closed ends it, unless there is something that SIGHUP has it read again.
  ASSIGN_OR_RETURN(SignalPipe signals, flags.keys.empty() && door.audit == nullptr
                                           ? SignalPipe::Catch({SIGTERM, SIGINT})
                                           : SignalPipe::Catch({SIGTERM, SIGINT, SIGHUP}));
  RETURN_IF_ERROR(OpenJobs(flags));
  ASSIGN_OR_RETURN(std::shared_ptr<library::StoreAccess> store, OpenFor(flags));
  ASSIGN_OR_RETURN(
      std::shared_ptr<library::LoadedModel> model,
      library::LoadedModel::Load(retrieval.model_dir, retrieval.adapter_dir, retrieval.threads));
  if (retrieval.missing_bytes == "drop") model->DropMissingBytes();
  ServiceInUse in_use;
  std::unique_ptr<kvstore::Residence> residence;  // goes after the service, before the store
  if (flags.replica.given()) {
    const kvstore::ResidenceTarget target = TargetOf(*store->engine(), in_use);
    ASSIGN_OR_RETURN(residence, flags.replica.Start(*store->engine(), &target));
    store->SetSource(residence.get());
  }
  RETURN_IF_ERROR(Serve(flags, door, signals, std::move(model), store, residence.get(), in_use));
  if (!door.token_file.empty()) unlink(door.token_file.c_str());
  return absl::OkStatus();
}

// What becomes of conversations between their turns.
void DeclareSequences(CLI::App& command, ApiFlags& flags) {
  command
      .add_option(
          "--max-sequences", flags.config.engine.scheduler.conversations.most,
          "conversations whose rows wait for their next turn; the one used longest ago goes; "
          "0: none")
      ->check(CLI::Range(int64_t{0}, int64_t{100000}));
  command
      .add_option("--sequence-memory", flags.config.engine.scheduler.conversations.memory_bytes,
                  "of those in memory: bytes or 512MB; beyond it they go to files")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true));
  command.add_option("--idle-after", flags.idle_after,
                     "a conversation that was idle for so long goes to a file in /var/tmp");
}

// Who prefills what clients bring, if not this process.
void DeclareJobs(CLI::App& command, ApiFlags& flags) {
  command.add_option("--jobs", flags.jobs.remote,
                     "s3://BUCKET/PREFIX: documents that clients bring are prefilled by carrel "
                     "worker into this bucket, whose contexts --server has");
  flags.jobs.DeclareDoorbell(command);
}

// Who may come, and how many.
void DeclareDoor(CLI::App& command, ApiFlags& flags) {
  command.add_option("--audit-log", flags.audit_log,
                     "file that is appended to: lines of answers, documents, deletions and "
                     "denials; opened again on "
                     "SIGHUP");
  command.add_flag(
      "--anyone-may-add-and-delete", flags.anyone_may_write,
      "without --keys: whoever reaches the address may do everything, without the token");
  command.add_flag("--open", flags.open_page, "open the page in a browser, with the token");
  command
      .add_option("--request-budget", flags.config.http.budget_bytes,
                  "what requests and replies on their way may hold: bytes or 256MB")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->check(CLI::Range(int64_t{1} << 20, int64_t{1} << 40));
  command
      .add_option("--max-connections", flags.config.http.max_connections,
                  "connections that have asked something; beyond it the idlest goes")
      ->check(CLI::Range(int64_t{1}, int64_t{1000000}));
  DeclareJobs(command, flags);
}

}  // namespace

void AddApi(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<ApiFlags>();
  CLI::App& command = *app.add_subcommand(
      "api", "Answer OpenAI's API (chat and completions) over contexts, until SIGTERM or SIGINT");
  flags->config.http.listen = {"127.0.0.1:8080"};
  flags->retrieval.DeclareModel(command);
  DeclareMissingBytes(command, flags->retrieval.missing_bytes);
  flags->retrieval.DeclareWeights(command);
  flags->retrieval.store.DeclareSeveral(command);
  flags->replica.Declare(command);
  command.add_option("--listen", flags->config.http.listen,
                     "HOST:PORT or unix:PATH; may be repeated");
  command.add_option("--model-name", flags->config.model_name,
                     "what clients call the model; by default the name of its file or folder");
  command.add_option("--keys", flags->keys,
                     "file that says who may do what, as of serve: Authorization: Bearer KEY");
  DeclareDoor(command, *flags);
  command.add_flag("--read-only", flags->read_only,
                   "--store: take no lock, and no documents; see what others publish");
  command
      .add_option("--index", flags->config.engine.documents->index,
                  "of documents that clients bring: flat | int8 | code | auto")
      ->check(CLI::IsMember({"flat", "int8", "code", "auto"}));
  command
      .add_option("--max-document-bytes", flags->config.max_document_bytes,
                  "of a text that a client brings: bytes or 16MB")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->check(CLI::Range(int64_t{1}, int64_t{60} << 20));
  command
      .add_option("--max-queued-documents", flags->config.engine.documents->max_queued,
                  "documents that may wait for prefill; one more is refused")
      ->check(CLI::Range(int64_t{1}, int64_t{1000}));
  command
      .add_option("--keep-documents", flags->config.engine.documents->keep,
                  "long documents at the beginning of prompts that are kept as contexts; the one "
                  "used longest ago goes; 0: none")
      ->check(CLI::Range(int64_t{0}, int64_t{10000}));
  command
      .add_option("--keep-tokens", flags->config.engine.documents->keep_tokens,
                  "--keep-documents: of how many tokens at least")
      ->check(CLI::Range(int64_t{272}, int64_t{1} << 30));
  command.add_flag("--insecure", flags->config.insecure,
                   "listen where others can reach it, without TLS");
  command
      .add_option("--max-waiting", flags->config.engine.scheduler.max_waiting,
                  "requests that may wait, with --keys half as many of one; one more is refused")
      ->check(CLI::Range(int64_t{1}, int64_t{1000000}));
  command
      .add_option("--max-answers", flags->config.engine.scheduler.max_answers,
                  "answers on their way at a time, token by token together")
      ->check(CLI::Range(int64_t{1}, int64_t{1024}));
  command
      .add_option("--max-open-contexts", flags->config.engine.scheduler.max_open_contexts,
                  "contexts whose decoders stay open while nobody asks")
      ->check(CLI::Range(int64_t{1}, int64_t{1024}));
  DeclareSequences(command, *flags);
  flags->retrieval.DeclareRetrieval(command);
  command.get_option("--model")->required(false);  // it may come from a file
  UseConfigFile(command);
  command.callback([flags, &chosen] { chosen = [flags] { return RunApi(*flags); }; });
}

}  // namespace carrel::tools
