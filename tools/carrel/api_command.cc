#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <utility>

#include "absl/strings/str_join.h"
#include "common/status.h"
#include "http_api/api_service.h"
#include "kvstore/access/access.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/retrieval_flags.h"
#include "tools/carrel/signal_pipe.h"

namespace carrel::tools {
namespace {

struct ApiFlags {
  RetrievalFlags retrieval;
  http_api::ApiConfig config;
  std::string keys;
};

absl::Status RunApi(ApiFlags& flags) {
  RetrievalFlags& retrieval = flags.retrieval;
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
  config.answerer.retrieval = retrieval.config;
  config.answerer.device = retrieval.device_config;
  config.answerer.folder = retrieval.store.folder;
  ASSIGN_OR_RETURN(SignalPipe signals, SignalPipe::Catch({SIGTERM, SIGINT}));
  ASSIGN_OR_RETURN(std::shared_ptr<library::StoreAccess> store,
                   stored ? OpenStore(retrieval)
                          : absl::StatusOr<std::shared_ptr<library::StoreAccess>>(nullptr));
  ASSIGN_OR_RETURN(
      std::shared_ptr<library::LoadedModel> model,
      library::LoadedModel::Load(retrieval.model_dir, retrieval.adapter_dir, retrieval.threads));
  ASSIGN_OR_RETURN(const std::unique_ptr<http_api::ApiService> service,
                   http_api::ApiService::Start(config, std::move(model), std::move(store)));
  std::fprintf(stderr, "carrel api: model %s on http://%s/v1\n", config.model_name.c_str(),
               absl::StrJoin(service->addresses(), "/v1 http://").c_str());
  const int signal = signals.Wait();
  std::fprintf(stderr, "carrel api: %s: stopping\n", strsignal(signal));
  return absl::OkStatus();
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
  command.add_flag("--insecure", flags->config.insecure,
                   "listen where others can reach it, without TLS");
  command
      .add_option("--max-waiting", flags->config.answerer.max_waiting,
                  "requests that may wait; one more is refused")
      ->check(CLI::Range(int64_t{1}, int64_t{1000000}))
      ->capture_default_str();
  command
      .add_option("--max-open-contexts", flags->config.answerer.max_open_contexts,
                  "contexts whose decoders stay open")
      ->check(CLI::Range(int64_t{1}, int64_t{1024}))
      ->capture_default_str();
  flags->retrieval.DeclareRetrieval(command);
  command.callback([flags, &chosen] { chosen = [flags] { return RunApi(*flags); }; });
}

}  // namespace carrel::tools
