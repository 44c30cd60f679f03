#include "http_api/api_service.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "carrel/v1/context.pb.h"
#include "common/json.h"
#include "common/status.h"
#include "common/thrown.h"
#include "http_api/api_error.h"
#include "http_api/api_metrics.h"
#include "http_api/brings.h"
#include "http_api/completions_api.h"
#include "http_api/contexts_api.h"
#include "http_api/document_body.h"
#include "http_api/http_message.h"
#include "http_api/page.h"
#include "kvstore/access/admission.h"
#include "kvstore/service/context_client.h"
#include "kvstore/service/credentials.h"
#include "kvstore/service/listen_address.h"
#include "serving/job_documents.h"
#include "serving/still_allowed.h"
#include "serving/turn_pool.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;

constexpr char kJson[] = "application/json";
// Of a body that asks something; of one that nobody reads.
constexpr int64_t kQuestionBytes = int64_t{1} << 20, kNoBodyBytes = int64_t{64} << 10;

// What the gate found out about a request.
struct Passed {
  const HttpRoute* route = nullptr;
  std::string name;                       // what the route's {} stands for
  std::shared_ptr<kvstore::Visit> visit;  // null: an open route
};

HttpVerdict Refused(const absl::Status& status, HttpFields fields = {}) {
  HttpError error = ErrorOf(status);
  HttpVerdict verdict;
  verdict.status = error.status;
  verdict.content_type = kJson;
  verdict.body = std::move(error.body);
  verdict.fields = std::move(error.fields);
  for (auto& field : fields) verdict.fields.push_back(std::move(field));
  if (error.status == 401) verdict.fields.emplace_back("WWW-Authenticate", "Bearer");
  return verdict;
}

kvstore::Caller CallerOf(const HttpRequest& request) {
  kvstore::Caller caller;
  caller.peer = request.peer;
  caller.local = request.local;
  caller.uid = request.uid;
  absl::string_view key = request.authorization;
  if (absl::StartsWithIgnoreCase(key, "bearer ")) key.remove_prefix(7);
  caller.key = std::string(absl::StripAsciiWhitespace(key));
  return caller;
}

class OpenAiService final : public ApiService {
 public:
  OpenAiService(ApiConfig config, std::shared_ptr<library::LoadedModel> model,
                std::shared_ptr<library::StoreAccess> store)
      : config_(std::move(config)),
        model_(std::move(model)),
        store_(std::move(store)),
        admission_(config_.access, config_.audit) {}

  ~OpenAiService() override {
    if (http_ != nullptr) http_->Stop();  // no new requests,
    // none that wait for a context (those on their way may come to it yet),
    if (brings_ != nullptr) brings_->End();
    {
      absl::MutexLock lock(&later_mu_);
      later_ = nullptr;
    }
    prepare_ = nullptr;  // none on their way,
    engine_ = nullptr;   // none that wait for a document, and none left
  }

  absl::Status Listen() {
    if (model_->checkpoint().tokenizer == nullptr) {
      return absl::FailedPreconditionError("the model came without a tokenizer");
    }
    RETURN_IF_ERROR(CheckExposure());
    serving::EngineConfig engine = config_.engine;
    engine.scheduler.max_waiting_of_turn = MostOfOneTurn();
    engine.documents->still_may = [this](const std::string& who, const std::string& context) {
      return StillMay(who, context);
    };
    if (config_.jobs != nullptr) engine.documents_by = DocumentsByJobs();
    ASSIGN_OR_RETURN(engine_, serving::Engine::Start(std::move(engine), model_, store_));
    RETURN_IF_ERROR(engine_->turn_head().status());
    if (const absl::Status chat = engine_->chat().status(); !chat.ok() && !absl::IsNotFound(chat)) {
      spdlog::warn("chats are refused, all else is served: {}", std::string(chat.message()));
    }
    if (store_ != nullptr) brings_ = std::make_unique<Brings>(store_.get());
    prepare_ = std::make_unique<serving::TurnPool>(
        serving::TurnQueueConfig{.places = kPreparing,
                                 .waiting = config_.engine.scheduler.max_waiting,
                                 .of_one_turn = MostOfOneTurn(),
                                 .what = "requests"});
    {
      absl::MutexLock lock(&later_mu_);
      later_ = prepare_.get();
    }
    completions_ = std::make_unique<CompletionsApi>(
        CompletionsApi::Parts{.engine = engine_.get(),
                              .model_name = config_.model_name,
                              .keep = config_.engine.documents->keep,
                              .keep_tokens = config_.engine.documents->keep_tokens,
                              .later = Later(),
                              .still_allowed = &still_allowed_,
                              .brings = brings_.get()});
    HttpServerConfig http = config_.http;
    http.budget_bytes = std::max(http.budget_bytes, 8 * DocumentBytes());
    ASSIGN_OR_RETURN(http_, HttpServer::Start(
                                http, [this](const HttpRequest& head) { return Judge(head); },
                                [this](HttpRequest request, std::shared_ptr<HttpReply> reply) {
                                  Accept(std::move(request), std::move(reply));
                                }));
    listening_ = true;
    listening_.notify_all();
    return absl::OkStatus();
  }

  const std::vector<std::string>& addresses() const override { return http_->addresses(); }
  bool Reads(const std::string& context) const override {
    return engine_->scheduler().Reads(context);
  }
  absl::Status LetGo(const std::string& context) override {
    return engine_->scheduler().Close(context);
  }

 private:
  // What may block (the store, a template) is not the server's thread's. Beside these one for turns that have none.
  static constexpr int kPreparing = 4;

  // A request that waits for a thread. One of two answers it: who prepares it, or who sees that its key was
  // withdrawn.
  struct Waiting {
    HttpRequest request;
    std::shared_ptr<Passed> passed;
    std::shared_ptr<HttpReply> reply;
    absl::Mutex mu;
    bool begun ABSL_GUARDED_BY(mu) = false;
  };

  // Of what waits. Without keys all are one turn, or the machine's owner: nobody is to be left room for.
  int64_t MostOfOneTurn() const {
    const int64_t most = config_.engine.scheduler.max_waiting;
    return config_.access->has_keys() ? (most + 1) / 2 : most;
  }

  decltype(serving::EngineConfig::documents_by) DocumentsByJobs() const {
    return [this](std::unique_ptr<serving::Documents> contexts, serving::Scheduler* scheduler) {
      const serving::DocumentsConfig& documents = *config_.engine.documents;
      return serving::MakeJobDocuments({.model_name = config_.model_name,
                                        .index = documents.index,
                                        .max_queued = documents.max_queued},
                                       std::move(contexts), config_.jobs, model_, scheduler);
    };
  }

  // For those who are told on a thread that must not wait; for as long as there is a pool.
  serving::RunLater Later() {
    return [this](serving::Turn turn, std::function<void()> task) {
      absl::MutexLock lock(&later_mu_);
      if (later_ != nullptr) later_->Continue(std::move(turn), std::move(task));
      return later_ != nullptr;
    };
  }

  // A document that waited through a restart is its key's, as long as there is one of the name. Without keys nothing is
  // withdrawn.
  absl::Status StillMay(const std::string& who, const std::string& context) const {
    if (!config_.access->has_keys()) return absl::OkStatus();
    const std::shared_ptr<kvstore::Principal> now = config_.access->Named(who);
    if (now != nullptr) return MayBring(*now, context);
    return absl::PermissionDeniedError(absl::StrCat("key ", who, " was withdrawn"));
  }

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

  // A link on another page or in a mail is followed: whose page that was sees nothing of ours, which asks nothing by
  // itself. Not in a frame, and of nothing but the page.
  static bool OpensThePage(const HttpRequest& request) {
    return request.method == "GET" && request.at.segments.empty() &&
           request.fetch_mode == "navigate" && request.fetch_dest == "document";
  }

  // A page of another origin has no business here, and one that had its name point to this address is one.
  absl::Status CheckOrigin(const HttpRequest& request) const {
    const std::string& site = request.fetch_site;
    const size_t authority = request.origin.find("://");
    const bool foreign_origin =
        !request.origin.empty() &&
        (authority == std::string::npos ||
         !SameAuthority(absl::string_view(request.origin).substr(authority + 3), request.host));
    const bool foreign_site =
        !site.empty() && site != "same-origin" && site != "none" && !OpensThePage(request);
    if (foreign_origin || foreign_site) {
      return absl::PermissionDeniedError(
          absl::StrCat("Origin ", request.origin.empty() ? site : request.origin.substr(0, 200),
                       " is not this server's"));
    }
    if (config_.access->has_keys() || config_.insecure || request.local || request.host.empty() ||
        IsLocalHostOrAddress(request.host)) {
      return absl::OkStatus();
    }
    return absl::PermissionDeniedError(absl::StrCat(
        "Host ", request.host.substr(0, 200),
        " is neither localhost nor an address: without --keys other names are refused"));
  }

  int64_t DocumentBytes() const { return 2 * config_.max_document_bytes + kNoBodyBytes; }

  // By the headers, on the server's thread, before a body is read: nothing here blocks.
  HttpVerdict Judge(const HttpRequest& head) {
    if (const absl::Status status = CheckOrigin(head); !status.ok()) return Refused(status);
    RouteFound found = FindRoute(head.method, head.at.segments);
    if (head.method == "OPTIONS" && (!found.allow.empty() || head.target == "*")) {
      HttpVerdict verdict;
      verdict.status = 204;
      verdict.content_type = kJson;
      verdict.fields = {
          {"Allow", found.allow.empty() ? "GET, HEAD, POST, DELETE, OPTIONS" : found.allow}};
      return verdict;
    }
    if (found.allow.empty()) {
      return Refused(
          absl::NotFoundError(absl::StrCat("there is no ", ShownJson(json(head.target), 200))));
    }
    if (found.route == nullptr) {
      return Refused(WithHttpStatus(absl::InvalidArgumentError(absl::StrCat(
                                        head.target.substr(0, 200), " is for ", found.allow,
                                        ", not ", head.method.substr(0, 40))),
                                    405),
                     {{"Allow", found.allow}});
    }
    auto passed = std::make_shared<Passed>();
    passed->route = found.route;
    passed->name = std::move(found.name);
    if (!found.route->open) {
      const absl::Status admitted = Admit(head, *passed);
      if (!admitted.ok()) {
        CountRequest(found.route->pattern, admitted);
        return Refused(admitted);
      }
    }
    if (const absl::Status coded = CheckCoding(head.content_encoding); !coded.ok()) {
      return Refused(coded);
    }
    HttpVerdict verdict;
    verdict.max_body_bytes = BodyBytes(*passed);
    verdict.may_take_long = MayTakeLong(*found.route);
    verdict.passed = std::move(passed);
    return verdict;
  }

  // Answers, and what waits for a document.
  static bool MayTakeLong(const HttpRoute& route) {
    const absl::string_view pattern = route.pattern;
    return absl::EndsWith(pattern, "completions") || absl::EndsWith(pattern, "/events") ||
           absl::EndsWith(pattern, "/text") || absl::EndsWith(pattern, "/warm");
  }

  absl::Status Admit(const HttpRequest& head, Passed& passed) {
    const std::string call = RouteCall(*passed.route);
    absl::StatusOr<kvstore::Visit> visit = admission_.Admit(CallerOf(head), call);
    if (absl::IsUnauthenticated(visit.status()) && head.authorization.empty()) {
      return absl::UnauthenticatedError("a key is wanted: Authorization: Bearer KEY");
    }
    RETURN_IF_ERROR(visit.status());
    passed.visit = std::make_shared<kvstore::Visit>(*std::move(visit));
    const bool of_context = absl::StartsWith(passed.route->pattern, "/v1/contexts");
    RETURN_IF_ERROR(TellOfToken(passed.visit->Allow(call, of_context ? passed.name : "")));
    const absl::Status spent = passed.visit->SpendCall();
    return spent.ok() ? spent : WithRetryAfter(spent, absl::Seconds(1));
  }

  // Without keys, who lacks a right lacks the token.
  absl::Status TellOfToken(const absl::Status& status) const {
    if (!absl::IsPermissionDenied(status) || config_.access->has_keys()) return status;
    return absl::PermissionDeniedError(absl::StrCat(
        status.message(), ": adding and deleting need the token that carrel api printed at its ",
        "start (Authorization: Bearer TOKEN)",
        config_.token_file.empty() ? "" : ", which is also in ", config_.token_file));
  }

  int64_t BodyBytes(const Passed& passed) const {
    switch (passed.route->body) {
      case BodyBound::kNone:
        return kNoBodyBytes;
      case BodyBound::kDocument:
        return DocumentBytes();
      case BodyBound::kQuestion:
        break;
    }
    // Where prompts' documents are kept, a prompt may be as long as one, of who may have it kept.
    const bool keeps = config_.engine.documents->keep > 0 &&
                       passed.visit->principal().Check(kvstore::Right::kImport).ok();
    return keeps ? std::max(kQuestionBytes, DocumentBytes()) : kQuestionBytes;
  }

  static void SendPage(HttpReply& reply) {
    reply.Send(200, "text/html; charset=utf-8", Page(),
               {{"Content-Security-Policy", PagePolicy()},
                {"Referrer-Policy", "no-referrer"},
                {"Cache-Control", "no-cache"}});
  }

  void Accept(HttpRequest request, std::shared_ptr<HttpReply> reply) {
    const auto passed = std::static_pointer_cast<Passed>(request.passed);
    const absl::string_view pattern = passed->route->pattern;
    if (pattern == "/") return SendPage(*reply);
    if (absl::StartsWith(pattern, "/health")) {
      return reply->Send(
          200, kJson,
          DumpJson(json{{"status", "ok"}, {"waiting", engine_->scheduler().waiting()}}));
    }
    if (pattern == "/ready") {
      const bool ready = config_.ready == nullptr || config_.ready();
      return reply->Send(ready ? 200 : 503, kJson,
                         DumpJson(json{{"status", ready ? "ok" : "warming"}}));
    }
    passed->visit->SpendBytes(static_cast<int64_t>(request.body.size()));
    const auto waiting = std::make_shared<Waiting>();
    waiting->request = std::move(request);
    waiting->passed = passed;
    waiting->reply = std::move(reply);
    const absl::Status taken =
        prepare_->Submit(passed->visit->turn(), [this, waiting] { Prepare(*waiting); });
    if (!taken.ok()) {
      return SendError(*waiting->reply, WithRetryAfter(taken, absl::Seconds(1)));
    }
    still_allowed_.Watch([weak = std::weak_ptr<Waiting>(waiting)] {
      const auto held = weak.lock();
      return held != nullptr && LookAgain(*held);
    });
  }

  void Prepare(Waiting& waiting) {
    {
      absl::MutexLock lock(&waiting.mu);
      if (waiting.begun) return;
      waiting.begun = true;
    }
    // An answer that nobody waits for is not begun; what changes something is done all the same.
    if (MayTakeLong(*waiting.passed->route) && waiting.reply->gone()) return;
    Handle(waiting.request, *waiting.passed, waiting.reply);
  }

  // False: it waits no more.
  static bool LookAgain(Waiting& waiting) {
    absl::MutexLock lock(&waiting.mu);
    if (waiting.begun || waiting.reply->gone()) return false;
    const absl::Status still = waiting.passed->visit->StillAllowed();
    if (still.ok()) return true;
    waiting.begun = true;
    waiting.request = HttpRequest();  // its bytes are given back
    CountRequest(waiting.passed->route->pattern, still);
    SendError(*waiting.reply, still);
    return false;
  }

  void Handle(const HttpRequest& request, const Passed& passed,
              const std::shared_ptr<HttpReply>& reply) {
    listening_.wait(false);  // the first may come before Start has returned http_
    const absl::Status status = OfStore(CatchThrown(absl::StrCat("request ", request.id),
                                                    [&] { return Route(request, passed, reply); }));
    CountRequest(passed.route->pattern, status);
    const bool asks = absl::EndsWith(passed.route->pattern, "completions");
    if (asks && !status.ok()) passed.visit->Log("open", status);
    if (absl::IsInternal(status)) {
      spdlog::error("request {}: {} {}: {}", request.id, request.method,
                    ShownJson(json(request.target), 200), std::string(status.message()));
    }
    if (!status.ok()) SendError(*reply, status);
  }

  // A kvstore that refuses this server's own key is no fault of its client.
  absl::Status OfStore(absl::Status status) const {
    if (!absl::IsUnauthenticated(status)) return status;
    return absl::UnavailableError(
        absl::StrCat("the kvstore does not take this server's own key: ", status.message()));
  }

  absl::Status Route(const HttpRequest& request, const Passed& passed,
                     const std::shared_ptr<HttpReply>& reply) {
    const absl::string_view pattern = passed.route->pattern;
    kvstore::Principal& who = passed.visit->principal();
    RETURN_IF_ERROR(passed.visit->StillAllowed());  // it may have waited
    if (pattern == "/v1/chat/completions" || pattern == "/v1/completions") {
      return completions_->Handle(absl::StrContains(pattern, "chat"), request, passed.visit, reply);
    }
    if (pattern == "/metrics") return SendMetrics(*reply);
    if (pattern == "/v1/models") return ListModels(who, *reply);
    if (pattern == "/v1/models/{}") return GetModel(passed.name, who, *reply);
    const ContextsApi contexts = {engine_.get(), config_.max_document_bytes, Later(),
                                  &still_allowed_, brings_.get()};
    return contexts.Handle(request, *passed.route, passed.name, passed.visit, reply);
  }

  absl::Status SendMetrics(HttpReply& reply) {
    const HttpServer::Counters http = http_->counters();
    reply.Send(200, "text/plain; version=0.0.4; charset=utf-8",
               ApiMetricsText(
                   {.connections = http.connections,
                    .connections_evicted = http.evicted,
                    .clients_slow = http.slow,
                    .bytes_held = http.held_bytes,
                    .bytes_refused = http.refused_bytes,
                    .answers_waiting = engine_->scheduler().waiting(),
                    .answers_running = engine_->scheduler().answering(),
                    .documents_waiting = engine_->documents() ? engine_->documents()->queued() : 0,
                    .sequences_in_memory = engine_->scheduler().prefixes().in_memory(),
                    .sequences_in_files = engine_->scheduler().prefixes().in_files()},
                   config_.more_metrics ? config_.more_metrics() : std::vector<MetricFamily>()));
    return absl::OkStatus();
  }

  static json ModelJson(const std::string& id, int64_t created) {
    return {{"id", id}, {"object", "model"}, {"created", created}, {"owned_by", "carrel"}};
  }

  json AdvisedSampling() const {
    const model::GenerationDefaults& advice = model_->checkpoint().generation_defaults;
    json told = json::object();
    const auto tell = [&](const char* name, const auto& value) {
      if (value.has_value()) told[name] = *value;
    };
    tell("temperature", advice.temperature);
    tell("top_p", advice.top_p);
    tell("top_k", advice.top_k);
    tell("min_p", advice.min_p);
    tell("repetition_penalty", advice.repetition_penalty);
    if (advice.samples().has_value()) told["samples"] = *advice.samples();
    return told;
  }

  absl::StatusOr<json> Models(const kvstore::Principal& who) {
    json data = json::array();
    data.push_back(ModelJson(config_.model_name, 0));
    // Whether it knows chats, and what its makers advise, which answers follow unless a request says otherwise.
    data.back()["carrel"] = {{"chat", engine_->chat().ok()}, {"sampling", AdvisedSampling()}};
    if (store_ == nullptr) return data;
    ASSIGN_OR_RETURN(const auto client, store_->NewContextClient());
    ASSIGN_OR_RETURN(const v1::ListResponse listed, client->List());
    for (const auto& context : listed.contexts()) {
      if (!who.Sees(context.name())) continue;
      data.push_back(ModelJson(absl::StrCat(config_.model_name, "@", context.name()),
                               context.created_unix_s()));
    }
    return data;
  }

  absl::Status ListModels(const kvstore::Principal& who, HttpReply& reply) {
    ASSIGN_OR_RETURN(json data, Models(who));
    json rights = json::array();
    for (const kvstore::Right right : {kvstore::Right::kList, kvstore::Right::kOpen,
                                       kvstore::Right::kImport, kvstore::Right::kDelete}) {
      if (who.Check(right).ok()) rights.push_back(std::string(kvstore::RightName(right)));
    }
    json may = {
        {"rights", std::move(rights)},
        {"key", config_.access->has_keys() ? json(who.name()) : json()},
        {"takes_documents", engine_->documents() != nullptr &&
                                (config_.engine.documents->writable || config_.jobs != nullptr)}};
    reply.Send(
        200, kJson,
        DumpJson(json{{"object", "list"}, {"data", std::move(data)}, {"carrel", std::move(may)}}));
    return absl::OkStatus();
  }

  absl::Status GetModel(const std::string& id, const kvstore::Principal& who, HttpReply& reply) {
    ASSIGN_OR_RETURN(const json data, Models(who));
    for (const json& model : data) {
      if (model["id"] != id) continue;
      reply.Send(200, kJson, DumpJson(model));
      return absl::OkStatus();
    }
    return absl::NotFoundError(
        absl::StrCat("no model ", ShownJson(json(id), 200), " (GET /v1/models)"));
  }

  const ApiConfig config_;
  const std::shared_ptr<library::LoadedModel> model_;
  const std::shared_ptr<library::StoreAccess> store_;
  kvstore::Admission admission_;
  serving::StillAllowed still_allowed_;
  std::atomic<bool> listening_{false};
  std::unique_ptr<HttpServer> http_;  // outlives the replies that the others hold
  std::unique_ptr<Brings> brings_;    // null: there is no store
  std::unique_ptr<serving::Engine> engine_;
  std::unique_ptr<CompletionsApi> completions_;
  std::unique_ptr<serving::TurnPool> prepare_;
  absl::Mutex later_mu_;
  serving::TurnPool* later_ ABSL_GUARDED_BY(later_mu_) = nullptr;  // prepare_, until it ends
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
