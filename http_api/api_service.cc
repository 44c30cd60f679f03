#include "http_api/api_service.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <nlohmann/json.hpp>
#include <limits>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/json.h"
#include "common/status.h"
#include "common/thread_pool.h"
#include "http_api/api_error.h"
#include "http_api/api_metrics.h"
#include "http_api/completions_api.h"
#include "http_api/contexts_api.h"
#include "http_api/page.h"
#include "kvstore/access/access.h"
#include "kvstore/service/context_client.h"
#include "kvstore/service/credentials.h"
#include "kvstore/service/listen_address.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;

constexpr char kJson[] = "application/json";
constexpr absl::string_view kChat = "/v1/chat/completions", kCompletions = "/v1/completions",
                            kModels = "/v1/models", kMetrics = "/metrics";

class OpenAiService final : public ApiService {
 public:
  OpenAiService(ApiConfig config, std::shared_ptr<library::LoadedModel> model,
                std::shared_ptr<library::StoreAccess> store)
      : config_(std::move(config)), model_(std::move(model)), store_(std::move(store)) {}

  ~OpenAiService() override {
    if (http_ != nullptr) http_->Stop();  // no new requests,
    prepare_ = nullptr;                   // none on their way,
    documents_ = nullptr;                 // none that wait for a document,
    answerer_ = nullptr;                  // and none left
  }

  absl::Status Listen() {
    if (model_->checkpoint().tokenizer == nullptr) {
      return absl::FailedPreconditionError("the model came without a tokenizer");
    }
    RETURN_IF_ERROR(CheckExposure());
    absl::StatusOr<std::unique_ptr<ChatTemplate>> chat =
        ChatTemplate::Load(config_.model_path, model_->checkpoint());
    if (chat.ok()) {
      chat_ = *std::move(chat);
    } else if (!absl::IsNotFound(chat.status())) {
      spdlog::warn("chats are refused, all else is served: {}",
                   std::string(chat.status().message()));
    }
    answerer_ = Answerer::Create(config_.answerer, model_, store_);
    if (store_ != nullptr) {
      ASSIGN_OR_RETURN(documents_,
                       Documents::Create(config_.documents, model_, store_, answerer_.get()));
    }
    prepare_ = std::make_unique<ThreadPool>(kPreparing, config_.answerer.max_waiting);
    const decoder::RetrievalConfig& retrieval = config_.answerer.retrieval;
    completions_ = std::make_unique<CompletionsApi>(CompletionsApi::Parts{
        .model = model_.get(),
        .store = store_.get(),
        .chat = chat_.get(),
        .chat_missing = chat.status(),
        .answerer = answerer_.get(),
        .documents = documents_.get(),
        .model_name = config_.model_name,
        .keep = config_.documents.keep,
        .keep_tokens = config_.documents.keep_tokens,
        .beyond_trained = retrieval.beyond_trained || retrieval.rope == decoder::Rope::kInfiniteHip,
        .most_given_up = decoder::MostGivenUp(retrieval, config_.answerer.device,
                                              std::numeric_limits<int64_t>::max()),
        .later = [this](std::function<void()> task) {
          return prepare_->TrySubmit(std::move(task));
        }});
    ASSIGN_OR_RETURN(
        http_, HttpServer::Start(config_.http,
                                 [this](HttpRequest request, std::shared_ptr<HttpReply> reply) {
                                   Accept(std::move(request), std::move(reply));
                                 }));
    listening_ = true;
    listening_.notify_all();
    return absl::OkStatus();
  }

  const std::vector<std::string>& addresses() const override { return http_->addresses(); }

 private:
  // What may block (the store, a template) is not the server's thread's.
  static constexpr int kPreparing = 4;

  absl::Status CheckExposure() const {
    if (config_.insecure) return absl::OkStatus();
    for (const std::string& text : config_.http.listen) {
      ASSIGN_OR_RETURN(const kvstore::ListenAddress address, kvstore::ParseListenAddress(text));
      if (address.unix_path.empty() && !kvstore::IsLoopback(address)) {
        return absl::FailedPreconditionError(absl::StrCat(
            "listen=", text,
            " can be reached by others, who would read questions and keys in the clear: "
            "listen on loopback behind a proxy that speaks TLS, or say --insecure"));
      }
    }
    return absl::OkStatus();
  }

  // A page of another origin has no business here, and one that had its name point to this address
  // is one.
  absl::Status CheckOrigin(const HttpRequest& request) const {
    const std::string& site = request.fetch_site;
    const size_t authority = request.origin.find("://");
    const bool same = site.empty() ? request.origin.empty() ||
                                         (authority != std::string::npos &&
                                          request.origin.substr(authority + 3) == request.host)
                                   : site == "same-origin" || site == "none";
    if (!same) {
      return absl::PermissionDeniedError(
          absl::StrCat("Origin ", request.origin.substr(0, 200), " is not this server's"));
    }
    if (config_.access != nullptr || config_.insecure || request.host.empty()) {
      return absl::OkStatus();
    }
    const size_t port = request.host.rfind(':');
    const bool has_port = port != std::string::npos && request.host.back() != ']';
    const std::string host = has_port ? request.host.substr(0, port) : request.host;
    const auto numeric = [](char c) { return absl::ascii_isxdigit(c) || c == '.' || c == ':'; };
    const bool ipv4 = std::all_of(host.begin(), host.end(),
                                  [](char c) { return absl::ascii_isdigit(c) || c == '.'; });
    const bool ipv6 = host.size() > 2 && host.front() == '[' && host.back() == ']' &&
                      std::all_of(host.begin() + 1, host.end() - 1, numeric);
    if (ipv4 || ipv6 || host == "localhost") return absl::OkStatus();
    return absl::PermissionDeniedError(absl::StrCat(
        "Host ", host.substr(0, 200),
        " is neither localhost nor an address: without --keys other names are refused"));
  }

  static void SendPage(HttpReply& reply) {
    reply.Send(200, "text/html; charset=utf-8", Page(),
               {{"Content-Security-Policy", PagePolicy()},
                {"Referrer-Policy", "no-referrer"},
                {"Cache-Control", "no-cache"}});
  }

  void Accept(HttpRequest request, std::shared_ptr<HttpReply> reply) {
    if (const absl::Status status = CheckOrigin(request); !status.ok()) {
      return SendError(*reply, status);
    }
    if (request.target == "/" && (request.method == "GET" || request.method == "HEAD")) {
      return SendPage(*reply);
    }
    if (request.target == "/health") {
      return reply->Send(200, kJson,
                         DumpJson(json{{"status", "ok"}, {"waiting", answerer_->waiting()}}));
    }
    auto shared = std::make_shared<HttpRequest>(std::move(request));
    if (!prepare_->TrySubmit([this, shared, reply] { Handle(*shared, reply); })) {
      SendError(*reply, absl::ResourceExhaustedError("too many requests wait already"));
    }
  }

  void Handle(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
    listening_.wait(false);  // the first may come before Start has returned http_
    const absl::Status status = Route(request, reply);
    CountRequest(RouteName(request.target), status);
    if (!status.ok()) SendError(*reply, status);
  }

  static absl::string_view RouteName(absl::string_view target) {
    for (const absl::string_view known :
         {kChat, kCompletions, kModels, kMetrics, absl::string_view(ContextsApi::kTarget)}) {
      if (absl::StartsWith(target, known)) return known;
    }
    return "other";
  }

  absl::Status Route(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
    ASSIGN_OR_RETURN(const std::shared_ptr<kvstore::Principal> who, Admit(request));
    const bool chat = request.target == kChat;
    if (chat || request.target == kCompletions) {
      if (request.method != "POST") return WrongMethod(request, "POST");
      return completions_->Handle(chat, request, who, reply);
    }
    if (request.target == kMetrics) {
      if (who != nullptr) RETURN_IF_ERROR(who->Check(kvstore::Right::kList));
      reply->Send(200, "text/plain; version=0.0.4; charset=utf-8",
                  ApiMetricsText({.connections = http_->connections(),
                                  .answers_waiting = answerer_->waiting(),
                                  .answers_running = answerer_->answering(),
                                  .documents_waiting = documents_ ? documents_->queued() : 0,
                                  .sequences_in_memory = answerer_->conversations().in_memory,
                                  .sequences_in_files = answerer_->conversations().in_files}));
      return absl::OkStatus();
    }
    if (request.target == kModels) {
      if (request.method != "GET") return WrongMethod(request, "GET");
      return ListModels(who.get(), *reply);
    }
    if (absl::StartsWith(request.target, ContextsApi::kTarget)) {
      const ContextsApi contexts = {documents_.get(), &model_->checkpoint(), store_.get(),
                                    chat_.get(), config_.max_document_bytes};
      return contexts.Handle(request, who.get(), reply);
    }
    return absl::NotFoundError(absl::StrCat("there is no ", request.target.substr(0, 200)));
  }

  static absl::Status WrongMethod(const HttpRequest& request, const char* wanted) {
    return absl::InvalidArgumentError(
        absl::StrCat(request.target, " is for ", wanted, ", not ", request.method));
  }

  // Null: there are no keys.
  absl::StatusOr<std::shared_ptr<kvstore::Principal>> Admit(const HttpRequest& request) const {
    if (config_.access == nullptr) return std::shared_ptr<kvstore::Principal>();
    absl::string_view key = request.authorization;
    if (!absl::ConsumePrefix(&key, "Bearer ") || key.empty()) {
      return absl::UnauthenticatedError("a key is wanted: Authorization: Bearer KEY");
    }
    kvstore::Caller caller;
    caller.peer = request.peer;
    caller.key = std::string(key);
    return config_.access->Admit(caller);
  }

  absl::Status ListModels(kvstore::Principal* who, HttpReply& reply) {
    if (who != nullptr) RETURN_IF_ERROR(who->Check(kvstore::Right::kList));
    json data = json::array();
    const auto add = [&](const std::string& id, int64_t created) {
      data.push_back(
          {{"id", id}, {"object", "model"}, {"created", created}, {"owned_by", "carrel"}});
    };
    add(config_.model_name, 0);
    data.back()["carrel"] = {{"chat", chat_ != nullptr}};  // whether it knows chats
    if (store_ != nullptr) {
      ASSIGN_OR_RETURN(const auto client, store_->NewContextClient());
      ASSIGN_OR_RETURN(const v1::ListResponse listed, client->List());
      for (const auto& context : listed.contexts()) {
        if (who != nullptr && !who->Sees(context.name())) continue;
        add(absl::StrCat(config_.model_name, "@", context.name()), context.created_unix_s());
      }
    }
    reply.Send(200, kJson, DumpJson(json{{"object", "list"}, {"data", std::move(data)}}));
    return absl::OkStatus();
  }

  const ApiConfig config_;
  const std::shared_ptr<library::LoadedModel> model_;
  const std::shared_ptr<library::StoreAccess> store_;
  std::unique_ptr<ChatTemplate> chat_;
  std::atomic<bool> listening_{false};
  std::unique_ptr<HttpServer> http_;  // outlives the replies that the others hold
  std::unique_ptr<Answerer> answerer_;
  std::unique_ptr<Documents> documents_;  // null: there is no store
  std::unique_ptr<CompletionsApi> completions_;
  std::unique_ptr<ThreadPool> prepare_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ApiService>> ApiService::Start(
    const ApiConfig& config, std::shared_ptr<library::LoadedModel> model,
    std::shared_ptr<library::StoreAccess> store) {
  auto service = std::make_unique<OpenAiService>(config, std::move(model), std::move(store));
  RETURN_IF_ERROR(service->Listen());
  return service;
}

}  // namespace carrel::http_api
