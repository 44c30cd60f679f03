#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "common/status.h"
#include "http_api/api_service.h"
#include "kvstore/access/access.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/config_file.h"
#include "tools/carrel/retrieval_flags.h"
#include "tools/carrel/signal_pipe.h"

namespace carrel::tools {
namespace {

struct ApiFlags {
  RetrievalFlags retrieval;
  http_api::ApiConfig config;
  std::string keys;
  bool read_only = false;
  std::string idle_after = "60s";
};

// A folder is this process's alone, as of serve, unless it only reads.
absl::StatusOr<std::shared_ptr<library::StoreAccess>> OpenFor(const ApiFlags& flags) {
  const StoreFlags& store = flags.retrieval.store;
  if (store.folder.empty() && store.server.empty()) return nullptr;
  if (!flags.config.documents.writable) return OpenStore(flags.retrieval);
  absl::StatusOr<std::shared_ptr<library::StoreAccess>> opened =
      library::StoreAccess::Open(store, kvstore::StoreMode::kReadWrite);
  if (opened.ok()) return opened;
  return Annotate(opened.status(), "--store (with --read-only it is only read)");
}

absl::Status RunApi(ApiFlags& flags) {
  RetrievalFlags& retrieval = flags.retrieval;
  if (retrieval.model_dir.empty()) return absl::InvalidArgumentError("api: --model is required");
  const bool stored = !retrieval.store.folder.empty() || !retrieval.store.server.empty();
  RETURN_IF_ERROR(retrieval.ResolveFor(stored));
  http_api::ApiConfig& config = flags.config;
  config.model_path = retrieval.model_dir;
  if (config.model_name.empty()) {
    config.model_name =
        std::filesystem::path(retrieval.model_dir).lexically_normal().stem().string();
  }
  if (!flags.keys.empty()) {
    ASSIGN_OR_RETURN(config.access, kvstore::Access::Create(flags.keys));
  }
  absl::Duration& idle = config.answerer.sequences.idle;
  if (!absl::ParseDuration(flags.idle_after, &idle) || idle < absl::Seconds(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("idle-after=", flags.idle_after, " is no duration of 1s or more"));
  }
  config.answerer.retrieval = retrieval.config;
  config.answerer.device = retrieval.device_config;
  config.answerer.folder = retrieval.store.folder;
  config.documents.address = retrieval.store;
  config.documents.writable = !retrieval.store.folder.empty() && !flags.read_only;
  config.documents.on_gpu = retrieval.device_config.device == model::Device::kCuda;
  if (config.documents.keep > 0 && !config.documents.writable) {
    return absl::InvalidArgumentError(
        "--keep-documents needs --store, without --read-only: that is where they are kept");
  }
  ASSIGN_OR_RETURN(SignalPipe signals, SignalPipe::Catch({SIGTERM, SIGINT}));
  ASSIGN_OR_RETURN(std::shared_ptr<library::StoreAccess> store, OpenFor(flags));
  ASSIGN_OR_RETURN(
      std::shared_ptr<library::LoadedModel> model,
      library::LoadedModel::Load(retrieval.model_dir, retrieval.adapter_dir, retrieval.threads));
  ASSIGN_OR_RETURN(const std::unique_ptr<http_api::ApiService> service,
                   http_api::ApiService::Start(config, std::move(model), std::move(store)));
  std::fprintf(stderr, "carrel api: model %s on http://%s/v1\n", config.model_name.c_str(),
               absl::StrJoin(service->addresses(), "/v1 http://").c_str());
  std::fprintf(stderr, "carrel api: a page for people on http://%s/\n",
               service->addresses().front().c_str());
  const int signal = signals.Wait();
  std::fprintf(stderr, "carrel api: %s: stopping\n", strsignal(signal));
  return absl::OkStatus();
}

// What becomes of conversations between their turns.
void DeclareSequences(CLI::App& command, ApiFlags& flags) {
  command
      .add_option(
          "--max-sequences", flags.config.answerer.sequences.most,
          "conversations whose rows wait for their next turn; the one used longest ago goes; "
          "0: none")
      ->check(CLI::Range(int64_t{0}, int64_t{100000}))
      ->capture_default_str();
  command
      .add_option("--sequence-memory", flags.config.answerer.sequences.memory_bytes,
                  "of those in memory: bytes or 512MB; beyond it they go to files")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->capture_default_str();
  command
      .add_option("--idle-after", flags.idle_after,
                  "a conversation that was idle for so long goes to a file in /var/tmp")
      ->capture_default_str();
}

}  // namespace

void AddApi(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<ApiFlags>();
  CLI::App& command = *app.add_subcommand(
      "api", "Answer OpenAI's API (chat and completions) over contexts, until SIGTERM or SIGINT");
  flags->config.http.listen = {"127.0.0.1:8080"};
  flags->retrieval.DeclareModel(command);
  flags->retrieval.store.Declare(command);
  command.add_option("--listen", flags->config.http.listen, "HOST:PORT; may be repeated")
      ->capture_default_str();
  command.add_option("--model-name", flags->config.model_name,
                     "what clients call the model; by default the name of its file or folder");
  command.add_option("--keys", flags->keys,
                     "file that says who may do what, as of serve: Authorization: Bearer KEY");
  command.add_flag("--read-only", flags->read_only,
                   "--store: take no lock, and no documents; see what others publish");
  command
      .add_option("--index", flags->config.documents.index,
                  "of documents that clients bring: flat | int8 | code | auto")
      ->check(CLI::IsMember({"flat", "int8", "code", "auto"}))
      ->capture_default_str();
  command
      .add_option("--max-document-bytes", flags->config.max_document_bytes,
                  "of a text that a client brings: bytes or 16MB")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->check(CLI::Range(int64_t{1}, int64_t{60} << 20))
      ->capture_default_str();
  command
      .add_option("--max-queued-documents", flags->config.documents.max_queued,
                  "documents that may wait for prefill; one more is refused")
      ->check(CLI::Range(int64_t{1}, int64_t{1000}))
      ->capture_default_str();
  command
      .add_option("--keep-documents", flags->config.documents.keep,
                  "long documents at the beginning of prompts that are kept as contexts; the one "
                  "used longest ago goes; 0: none")
      ->check(CLI::Range(int64_t{0}, int64_t{10000}))
      ->capture_default_str();
  command
      .add_option("--keep-tokens", flags->config.documents.keep_tokens,
                  "--keep-documents: of how many tokens at least")
      ->check(CLI::Range(int64_t{272}, int64_t{1} << 30))
      ->capture_default_str();
  command.add_flag("--insecure", flags->config.insecure,
                   "listen where others can reach it, without TLS");
  command
      .add_option("--max-waiting", flags->config.answerer.max_waiting,
                  "requests that may wait; one more is refused")
      ->check(CLI::Range(int64_t{1}, int64_t{1000000}))
      ->capture_default_str();
  command
      .add_option("--max-answers", flags->config.answerer.max_answers,
                  "answers on their way at a time, token by token together")
      ->check(CLI::Range(int64_t{1}, int64_t{1024}))
      ->capture_default_str();
  command
      .add_option("--max-open-contexts", flags->config.answerer.max_open_contexts,
                  "contexts whose decoders stay open while nobody asks")
      ->check(CLI::Range(int64_t{1}, int64_t{1024}))
      ->capture_default_str();
  DeclareSequences(command, *flags);
  flags->retrieval.DeclareRetrieval(command);
  command.get_option("--model")->required(false);  // it may come from a file
  UseConfigFile(command);
  command.callback([flags, &chosen] { chosen = [flags] { return RunApi(*flags); }; });
}

}  // namespace carrel::tools
