// carrel worker: takes prefill jobs of a bucket.
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "common/freed_memory.h"
#include "common/metric_family.h"
#include "common/shown.h"
#include "common/status.h"
#include "kvstore/service/metrics_listener.h"
#include "kvstore/service/metrics_text.h"
#include "kvstore/service/supervisor.h"
#include "library/document_text.h"
#include "serving/chat_probe.h"
#include "serving/jobs/prefill_runner.h"
#include "serving/jobs/worker.h"
#include "tools/carrel/chat_text.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/config_file.h"
#include "tools/carrel/job_flags.h"
#include "tools/carrel/log_format.h"
#include "tools/carrel/retrieval_flags.h"
#include "tools/carrel/signal_pipe.h"

namespace carrel::tools {
namespace {

struct WorkerFlags {
  JobFlags jobs;
  std::vector<std::string> models;
  std::string name, metrics, device = "cpu", poll = "5s", lease = "30s";
  int threads = 0;
  serving::PrefillRunnerConfig runner;
  LogFlags log;
};

// The bucket's client that leases go through gives up while they still hold.
kvstore::RetryPolicy Soon(absl::Duration lease) {
  return {.attempts = 6,
          .first = absl::Milliseconds(50),
          .most = absl::Seconds(1),
          .deadline = lease / 4};
}

absl::StatusOr<absl::Duration> DurationOf(const char* flag, const std::string& text) {
  absl::Duration duration;
  if (absl::ParseDuration(text, &duration)) return duration;
  return absl::InvalidArgumentError(
      absl::StrCat(flag, " ", Shown(text), " is no duration, such as 5s or 2m"));
}

// No other worker's: the machine may be the same, and the process's number, too.
std::string NewWorkerName() {
  char host[65] = "machine";
  (void)gethostname(host, sizeof host - 1);
  absl::BitGen bits;
  return absl::StrFormat("%.40s-%d-%08x", host, getpid(), absl::Uniform<uint32_t>(bits));
}

// A checkpoint, its chat template, and both as jobs use them.
struct Loaded {
  model::Checkpoint checkpoint;
  absl::StatusOr<Chat> chat;

  absl::StatusOr<std::vector<TokenId>> Encode(const std::string& text, bool raw, bool drop) const {
    model::Tokenizer::Dropped dropped;
    model::Tokenizer::Dropped* const may_drop = drop ? &dropped : nullptr;
    if (raw || checkpoint.tokenizer == nullptr) return checkpoint.EncodeDocument(text, may_drop);
    RETURN_IF_ERROR(chat.status());
    std::string head;
    if (*chat != nullptr) {
      ASSIGN_OR_RETURN(head, (*chat)->TurnHead());
    }
    return library::EncodeGivenText(*checkpoint.tokenizer, head, text, may_drop);
  }
};

absl::StatusOr<std::unique_ptr<Loaded>> LoadModel(const std::string& path, ThreadPool* pool) {
  const model::DigestCache cache(model::DigestCache::DefaultFolder());
  ASSIGN_OR_RETURN(model::Checkpoint checkpoint, model::LoadCheckpoint(path, pool, "", &cache));
  absl::StatusOr<Chat> chat = LoadChat(path, checkpoint);
  return std::make_unique<Loaded>(Loaded{std::move(checkpoint), std::move(chat)});
}

serving::RunnableModel Runnable(const std::string& path, const Loaded& loaded) {
  serving::RunnableModel model;
  model.name = std::filesystem::path(path).lexically_normal().stem().string();
  model.checkpoint = &loaded.checkpoint;
  model.encode = [&loaded](const std::string& text, bool raw, bool drop) {
    return loaded.Encode(text, raw, drop);
  };
  if (loaded.chat.ok() && *loaded.chat != nullptr) {
    model.probe = [&loaded](absl::Span<const TokenId> document) {
      return serving::ChatProbe(loaded.chat->get(), *loaded.checkpoint.tokenizer, document);
    };
  }
  return model;
}

// What a worker did, and what waits for it.
std::vector<MetricFamily> WorkerMetrics(const serving::WorkerStatistics& s) {
  return {
      GaugeFamily("carrel_worker_queue", "Open jobs of the bucket, at the last look.", s.queue),
      GaugeFamily("carrel_worker_queue_fitting", "Those of them that this worker's models can run.",
                  s.fitting),
      GaugeFamily("carrel_worker_running", "Jobs that run here.", s.running ? 1 : 0),
      TotalFamily("carrel_worker_jobs_taken_total", "Jobs whose lease this worker took.", s.taken),
      TotalFamily("carrel_worker_jobs_done_total", "Jobs that ended with a context.", s.done),
      TotalFamily("carrel_worker_jobs_found_total",
                  "Jobs that had ended, or whose context was there, when they were taken.",
                  s.found),
      TotalFamily("carrel_worker_tries_failed_total", "Tries that ended with an error.", s.failed),
      TotalFamily("carrel_worker_jobs_dead_total", "Jobs that were given up.", s.dead),
      TotalFamily("carrel_worker_jobs_cancelled_total",
                  "Jobs that were cancelled while they ran here.", s.cancelled),
      TotalFamily("carrel_worker_leases_lost_total",
                  "Jobs that another took over while they ran here.", s.lost),
      TotalFamily("carrel_worker_jobs_given_back_total",
                  "Jobs that were given back as this worker stopped.", s.given_back),
      TotalFamily("carrel_worker_objects_refused_total", "Objects in the queue that were no job.",
                  s.refused),
      TotalFamily("carrel_worker_job_seconds_total",
                  "That jobs took here, whatever became of them.", s.seconds)};
}

absl::StatusOr<std::unique_ptr<kvstore::MetricsListener>> Listen(const std::string& address,
                                                                 const serving::Worker& worker) {
  if (address.empty()) return nullptr;
  return kvstore::MetricsListener::Start(address, [&worker] {
    std::vector<MetricFamily> families = SnapshotMetrics();
    for (std::vector<MetricFamily> more :
         {WorkerMetrics(worker.statistics()), kvstore::ProcessMetrics()}) {
      families.insert(families.end(), std::make_move_iterator(more.begin()),
                      std::make_move_iterator(more.end()));
    }
    return kvstore::MetricsText(families);
  });
}

void SayLine(const std::string& line) { absl::FPrintF(stderr, "carrel worker: %s\n", line); }

// Until a signal comes; a second one ends the process at once, and the lease runs out.
void RunUntilSignal(serving::Worker& worker, const SignalPipe& signals) {
  std::thread work([&] {
    worker.Run();
    signals.Wake();
  });
  for (bool stopping = false;;) {
    const int signal = signals.Wait();
    if (signal == 0) break;
    if (stopping) {
      SayLine(absl::StrCat(strsignal(signal), " again: the job's lease runs out by itself"));
      _exit(1);
    }
    SayLine(absl::StrCat(strsignal(signal), ": stopping"));
    kvstore::NotifySupervisor("STOPPING=1");
    worker.Stop();
    stopping = true;
  }
  work.join();
}

absl::StatusOr<serving::WorkerConfig> ConfigOf(const WorkerFlags& flags) {
  serving::WorkerConfig config;
  ASSIGN_OR_RETURN(config.poll, DurationOf("--poll", flags.poll));
  ASSIGN_OR_RETURN(config.lease.time, DurationOf("--lease", flags.lease));
  config.lease.renew_every = std::min(config.lease.time / 5, absl::Seconds(3));
  config.lease.worker = flags.name.empty() ? NewWorkerName() : flags.name + "-" + NewWorkerName();
  config.say = &SayLine;
  RETURN_IF_ERROR(config.Validate());
  return config;
}

absl::Status CheckWorkerFlags(const WorkerFlags& flags) {
  RETURN_IF_ERROR(flags.jobs.Validate());
  if (flags.models.empty()) return absl::InvalidArgumentError("worker: --model is required");
  if (flags.runner.folder.empty()) {
    return absl::InvalidArgumentError(
        "worker: --work FOLDER is required: where contexts are made, and what a job that is "
        "interrupted goes on from");
  }
  if (flags.name.size() > 40) {
    return absl::InvalidArgumentError(
        absl::StrCat("--name has ", flags.name.size(), " bytes, must be at most 40"));
  }
  return absl::OkStatus();
}

absl::Status RunWorker(WorkerFlags& flags) {
  RETURN_IF_ERROR(CheckWorkerFlags(flags));
  RETURN_IF_ERROR(SetUpLog(flags.log));
  ASSIGN_OR_RETURN(flags.runner.device, model::ParseDevice(flags.device));
  ASSIGN_OR_RETURN(const int threads, ResolveThreads(flags.threads));
  ASSIGN_OR_RETURN(const serving::WorkerConfig config, ConfigOf(flags));
  const bool gpu = flags.runner.device == model::Device::kCuda;
  if (gpu) KeepFreedMemory();  // before there are threads
  ASSIGN_OR_RETURN(const SignalPipe signals, SignalPipe::Catch({SIGTERM, SIGINT}));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> leases,
                   flags.jobs.Open(Soon(config.lease.time)));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> files, flags.jobs.Open());
  ASSIGN_OR_RETURN(const std::unique_ptr<serving::Doorbell> doorbell,
                   flags.jobs.Doorbell(/*listen=*/true));
  ThreadPool pool((gpu && flags.threads == 0 ? threads + threads / 4 : threads) - 1);
  std::vector<std::unique_ptr<Loaded>> loaded;
  std::vector<serving::RunnableModel> models;
  std::vector<std::string> names;
  for (const std::string& path : flags.models) {
    ASSIGN_OR_RETURN(std::unique_ptr<Loaded> model, LoadModel(path, &pool));
    models.push_back(Runnable(path, *model));
    names.push_back(models.back().name);
    loaded.push_back(std::move(model));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<serving::PrefillRunner> runner,
                   serving::PrefillRunner::Create(flags.runner, *files, std::move(models), &pool));
  serving::JobBoard board(*leases);
  if (const absl::Status tidied = runner->Tidy(board); !tidied.ok()) {
    SayLine(absl::StrCat("what is left of older jobs stays for now: ", tidied.message()));
  }
  serving::Worker worker(board, *runner, *doorbell, config);
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::MetricsListener> metrics,
                   Listen(flags.metrics, worker));
  SayLine(absl::StrCat("ready for jobs of ", flags.jobs.remote, " for ", absl::StrJoin(names, ", "),
                       " as ", config.lease.worker));
  if (metrics != nullptr) {
    SayLine(absl::StrCat("metrics on http://", metrics->address(), "/metrics"));
  }
  kvstore::NotifySupervisor("READY=1");
  RunUntilSignal(worker, signals);
  SayLine("stopped");
  return absl::OkStatus();
}

}  // namespace

void AddWorker(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<WorkerFlags>();
  CLI::App& command = *app.add_subcommand(
      "worker", "Prefill documents that wait as jobs in a bucket, until SIGTERM or SIGINT");
  flags->jobs.Declare(command);
  command.add_option("--model", flags->models,
                     "folder or GGUF file; may be repeated: a job names one by its file's or "
                     "folder's name");
  command.add_option("--work", flags->runner.folder,
                     "folder where contexts are made before they are sent; of this worker alone, "
                     "and the same at its next start");
  DeclareDevice(command, flags->device, flags->runner.gpu_memory);
  command.add_option(
      "--threads", flags->threads,
      "0: one per core; with --device cuda five for four cores: some wait for the GPU");
  command.add_option("--name", flags->name,
                     "what jobs and logs call this worker, before its machine and number");
  command.add_option(
      "--poll", flags->poll,
      "how often the bucket is looked at while there is no work; with --nats a tenth "
      "as often");
  command.add_option("--lease", flags->lease,
                     "for how long a job stays with a worker that is not heard of: 5s to 1h");
  command.add_option("--metrics", flags->metrics,
                     "HOST:PORT or PORT (on 127.0.0.1) where Prometheus finds /metrics; not given: "
                     "nowhere");
  command.add_option("--log-format", flags->log.format, "text or json: one object a line");
  command.add_option("--log-level", flags->log.level, "trace, debug, info, warning, error or off");
  UseConfigFile(command);
  command.callback([flags, &chosen] { chosen = [flags] { return RunWorker(*flags); }; });
}

}  // namespace carrel::tools
