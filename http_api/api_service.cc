#include "http_api/api_service.h"

#include <algorithm>
#include <atomic>
#include <nlohmann/json.hpp>
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
#include "http_api/api_metrics.h"
#include "http_api/completion.h"
#include "http_api/contexts_api.h"
#include "http_api/known_prefixes.h"
#include "http_api/page.h"
#include "kvstore/access/access.h"
#include "kvstore/service/context_client.h"
#include "kvstore/service/credentials.h"
#include "kvstore/service/listen_address.h"
#include "library/document_ends.h"
#include "model/tokenizer/seam.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;

constexpr char kJson[] = "application/json";
constexpr absl::string_view kChat = "/v1/chat/completions", kCompletions = "/v1/completions",
                            kModels = "/v1/models", kMetrics = "/metrics";

void SendError(HttpReply& reply, const absl::Status& status) {
  const HttpError error = ErrorOf(status);
  reply.Send(error.status, kJson, error.body);
}

// One answer on its way to its client. Of one thread at a time: the one that prefills its document, if
// that comes first, and then the decoding one.
class Answering {
 public:
  Answering(CompletionHead head, CompletionRequest request, std::shared_ptr<HttpReply> reply)
      : head_(std::move(head)),
        request_(std::move(request)),
        reply_(std::move(reply)),
        filter_(request_.stop) {}

  // Once it is known; of which context the prompt is the rest, and whether the client named it.
  void SetPrompt(const std::string& context, bool recognised, int64_t prompt_tokens) {
    figures_.context = context;
    figures_.recognised = recognised;
    prompt_tokens_ = prompt_tokens;
  }

  bool Wanted() const { return !reply_->gone(); }

  // A document comes first: proxies and clients see that something goes on.
  void Waits(const Document& document) {
    if (!request_.stream || absl::Now() - told_ < absl::Seconds(1)) return;
    told_ = absl::Now();
    Begin();
    reply_->Write(absl::StrFormat(": the document is read: %.0f%%\n\n", 100 * document.progress));
  }

  bool Push(const std::string& piece) {
    Show(filter_.Push(piece));
    return !filter_.stopped() && !reply_->gone();
  }

  void Done(const absl::StatusOr<AnswerJob::Done>& done) {
    if (!done.ok()) return Failed(done.status());
    Show(filter_.Finish());
    const std::string finish = done->at_max_tokens && !filter_.stopped() ? "length" : "stop";
    const Usage usage = {.prompt_tokens = done->context_tokens + prompt_tokens_,
                         .cached_tokens = done->context_tokens + done->resumed_tokens,
                         .completion_tokens = done->tokens};
    figures_.context_tokens = done->context_tokens;
    figures_.with_sources = request_.sources > 0;
    figures_.sources = done->sources;
    figures_.rows_read = done->rows_read;
    figures_.prompt_ms = 1e3 * done->prompt_seconds;
    if (done->tokens > 1) {
      figures_.ms_per_token = 1e3 * done->generate_seconds / static_cast<double>(done->tokens - 1);
    }
    CountAnswer(reply_->gone() ? "left" : finish, usage, figures_);
    if (!request_.stream) {
      return reply_->Send(200, kJson, CompletionJson(head_, text_, finish, usage, figures_));
    }
    Begin();
    reply_->Write(FinishEvent(head_, finish, figures_));
    if (request_.stream_usage) reply_->Write(UsageEvent(head_, usage));
    reply_->Write(kDoneEvent);
    reply_->End();
  }

  // Once it has begun, an error can only be an event; that the end is missing tells too.
  void Failed(const absl::Status& status) {
    CountAnswer(reply_->gone() ? "left" : "failed", {}, {});
    if (!begun_) return SendError(*reply_, status);
    reply_->Write(ErrorEvent(status));
    reply_->End();
  }

 private:
  void Show(const std::string& text) {
    if (text.empty()) return;
    if (!request_.stream) {
      text_ += text;
      return;
    }
    Begin();
    reply_->Write(TextEvent(head_, text));
  }

  void Begin() {
    if (begun_) return;
    begun_ = true;
    reply_->Begin("text/event-stream; charset=utf-8");
    reply_->Write(FirstEvent(head_));
  }

  const CompletionHead head_;
  const CompletionRequest request_;
  const std::shared_ptr<HttpReply> reply_;
  int64_t prompt_tokens_ = 0;
  Figures figures_;
  StopFilter filter_;
  absl::Time told_ = absl::InfinitePast();
  std::string text_;
  bool begun_ = false;
};

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
    } else if (absl::IsNotFound(chat.status())) {
      chat_missing_ = chat.status();
    } else {
      return chat.status();
    }
    answerer_ = Answerer::Create(config_.answerer, model_, store_);
    if (store_ != nullptr) {
      ASSIGN_OR_RETURN(documents_,
                       Documents::Create(config_.documents, model_, store_, answerer_.get()));
    }
    prepare_ = std::make_unique<ThreadPool>(kPreparing, config_.answerer.max_waiting);
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
      return Complete(chat, request, who.get(), reply);
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

  // The content id; empty without a context.
  absl::StatusOr<std::string> FindContext(const std::string& name, kvstore::Principal* who) {
    if (name.empty()) return std::string();
    const absl::Status missing = absl::NotFoundError(absl::StrCat("no context \"", name, "\""));
    if (store_ == nullptr) return missing;
    if (who != nullptr) {
      RETURN_IF_ERROR(who->Check(kvstore::Right::kOpen));
      if (!who->Sees(name)) return missing;
    }
    ASSIGN_OR_RETURN(const auto client, store_->NewContextClient());
    const absl::StatusOr<v1::Manifest> manifest = client->Get(name);
    if (absl::IsNotFound(manifest.status())) return missing;
    RETURN_IF_ERROR(manifest.status());
    return manifest->content_id();
  }

  absl::Status CheckModel(const std::string& model) const {
    const std::string name = model.substr(0, model.find('@'));
    if (name.empty() || name == config_.model_name) return absl::OkStatus();
    return absl::NotFoundError(absl::StrCat("no model \"", name, "\": there is \"",
                                            config_.model_name, "\" (GET /v1/models)"));
  }

  absl::StatusOr<model::Seam> TokensOf(bool chat, const CompletionRequest& request,
                                       const std::string& content_id) {
    if (chat && chat_ == nullptr) return chat_missing_;
    const model::Tokenizer& tokenizer = *model_->checkpoint().tokenizer;
    model::Seam alone;
    if (request.context.empty()) {
      ASSIGN_OR_RETURN(alone.tokens, chat ? chat_->Encode(request.messages, tokenizer)
                                          : model_->checkpoint().EncodeDocument(request.prompt));
      return alone;
    }
    ASSIGN_OR_RETURN(const library::DocumentEnds document,
                     ends_.Of(request.context, content_id, *store_));
    const int64_t most = MostGivenUp(document.tokens);
    if (chat) return chat_->EncodeBehind(request.messages, tokenizer, document, most);
    return model::JoinTokens(tokenizer, document.last, most, request.prompt);
  }

  int64_t MostGivenUp(int64_t context_tokens) const {
    return decoder::MostGivenUp(config_.answerer.retrieval, config_.answerer.device,
                                context_tokens);
  }

  // How many tokens of the prompt are those of a document that is worth a context; 0: none are.
  size_t DocumentTokens(bool chat, const CompletionRequest& request,
                        const std::vector<TokenId>& prompt) {
    const auto least = static_cast<size_t>(config_.documents.keep_tokens);
    if (config_.documents.keep == 0 || prompt.size() < least) return 0;
    std::optional<CompletionRequest> document = DocumentPart(request);
    if (!document.has_value()) return 0;
    const absl::StatusOr<model::Seam> part = TokensOf(chat, *document, "");
    if (!part.ok()) return 0;
    const size_t same = CommonPrefix(part->tokens, prompt);
    return same >= least && same < prompt.size() ? same : 0;
  }

  absl::Status Complete(bool chat, const HttpRequest& http, kvstore::Principal* who,
                        const std::shared_ptr<HttpReply>& reply) {
    if (who != nullptr) RETURN_IF_ERROR(who->Check(kvstore::Right::kOpen));
    ASSIGN_OR_RETURN(CompletionRequest request, ParseCompletion(chat, http.body));
    RETURN_IF_ERROR(CheckModel(request.model));
    AnswerJob job;
    job.context = request.context;
    ASSIGN_OR_RETURN(job.content_id, FindContext(request.context, who));
    ASSIGN_OR_RETURN(model::Seam seam, TokensOf(chat, request, job.content_id));
    job.prompt = std::move(seam.tokens);
    job.give_up = seam.give_up;
    job.max_tokens = request.max_tokens;
    job.sources = request.sources;
    if (who != nullptr) job.who = who->name();
    job.sampling = {request.temperature, request.top_p, request.seed};
    size_t keep = 0;
    if (job.context.empty() && documents_ != nullptr) {
      auto known =
          documents_->Recognise(job.prompt, MostGivenUp(decoder::kMostGivenUp), SeenBy(who));
      if (known.has_value()) {
        job.context = known->name;
        job.content_id = known->content_id;
        job.prompt = std::move(known->prompt.rest);
        job.give_up = known->prompt.give_up;
      } else if (who == nullptr || who->Check(kvstore::Right::kImport).ok()) {
        keep = DocumentTokens(chat, request, job.prompt);
      }
    }
    CompletionHead head;
    head.chat = chat;
    head.id = NewId(chat);
    head.created_unix_s = absl::ToUnixSeconds(absl::Now());
    head.model = request.model.empty() ? config_.model_name : request.model;
    auto answering = std::make_shared<Answering>(std::move(head), request, reply);
    job.wanted = [answering] { return answering->Wanted(); };
    job.on_text = [answering](const std::string& piece) { return answering->Push(piece); };
    job.done = [answering](const absl::StatusOr<AnswerJob::Done>& done) { answering->Done(done); };
    if (keep > 0 && AnswerFromKept(job, keep, answering, who)) return absl::OkStatus();
    answering->SetPrompt(job.context, request.context.empty() && !job.context.empty(),
                         static_cast<int64_t>(job.prompt.size()));
    return answerer_->Submit(std::move(job));
  }

  // The first `keep` tokens of the prompt become a context, and the answer comes from there. False:
  // that cannot be, for want of room, say: it is answered without.
  bool AnswerFromKept(const AnswerJob& job, size_t keep,
                      const std::shared_ptr<Answering>& answering, kvstore::Principal* who) {
    const auto end = job.prompt.begin() + static_cast<std::ptrdiff_t>(keep);
    const auto added = documents_->Keep({job.prompt.begin(), end}, SeenBy(who));
    if (!added.ok() || !SeenBy(who)(added->document.name)) return false;
    const absl::Status watched = documents_->Watch(
        added->document.name, [this, answering, keep, job](const Document& document) {
          if (document.state == DocumentState::kReady) {
            AnswerJob rest = job;
            rest.context = document.name;
            rest.content_id = document.content_id;
            rest.prompt.erase(rest.prompt.begin(),
                              rest.prompt.begin() + static_cast<std::ptrdiff_t>(keep));
            answering->SetPrompt(rest.context, /*recognised=*/true,
                                 static_cast<int64_t>(rest.prompt.size()));
            Submit(std::move(rest), *answering);
            return false;
          }
          if (document.state == DocumentState::kFailed) {
            answering->SetPrompt("", false, static_cast<int64_t>(job.prompt.size()));
            Submit(job, *answering);
            return false;
          }
          answering->Waits(document);
          return answering->Wanted();
        });
    return watched.ok();
  }

  void Submit(AnswerJob job, Answering& answering) {
    if (const absl::Status status = answerer_->Submit(std::move(job)); !status.ok()) {
      answering.Failed(status);
    }
  }

  std::string NewId(bool chat) {
    return absl::StrFormat("%s-%08x%08x", chat ? "chatcmpl" : "cmpl", started_, ++answers_);
  }

  const ApiConfig config_;
  const std::shared_ptr<library::LoadedModel> model_;
  const std::shared_ptr<library::StoreAccess> store_;
  std::unique_ptr<ChatTemplate> chat_;
  absl::Status chat_missing_;
  const uint32_t started_ = std::random_device{}();
  std::atomic<uint32_t> answers_{0};
  library::DocumentEndsCache ends_;
  std::atomic<bool> listening_{false};
  std::unique_ptr<HttpServer> http_;  // outlives the replies that the others hold
  std::unique_ptr<Answerer> answerer_;
  std::unique_ptr<Documents> documents_;  // null: there is no store
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
