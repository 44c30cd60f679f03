#include "http_api/contexts_api.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/json.h"
#include "common/shown.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "http_api/api_error.h"
#include "http_api/completion.h"
#include "http_api/document_body.h"
#include "kvstore/access/access.h"
#include "library/document_text.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;

constexpr char kJson[] = "application/json";

const char* NameOf(serving::DocumentState state) {
  static constexpr const char* kNames[] = {"queued", "prefilling", "ready", "failed"};
  return kNames[static_cast<size_t>(state)];
}

json JsonOf(const serving::Document& document) {
  json value = {{"object", "context"},
                {"name", document.name},
                {"state", NameOf(document.state)},
                {"progress", document.progress},
                {"tokens", document.tokens},
                {"bytes", document.bytes},
                {"content_id", document.content_id.empty() ? json() : json(document.content_id)},
                {"index", document.index},
                {"created", document.created_unix_s},
                {"usable", document.usable},
                {"resident", document.resident}};
  if (document.state == serving::DocumentState::kPrefilling) value["where"] = document.where;
  if (document.state == serving::DocumentState::kFailed) {
    value["error"] = JsonOfError(document.error);
  }
  return value;
}

std::string EventOf(const serving::Document& document) {
  return absl::StrCat("data: ", DumpJson(JsonOf(document)), "\n\n");
}

// Who asked that a context be brought: answered once, whether he waits or not.
class WarmAnswer {
 public:
  WarmAnswer(std::shared_ptr<HttpReply> reply, std::shared_ptr<kvstore::Visit> visit,
             std::string name, absl::Time until)
      : reply_(std::move(reply)), visit_(std::move(visit)), name_(std::move(name)), until_(until) {}

  // True: it is brought, whoever waits.
  bool Tell(const kvstore::ContextComes& comes) {
    absl::MutexLock lock(&mu_);
    if (over_) return true;
    const absl::Status still = visit_->StillAllowed();
    if (!still.ok()) {
      over_ = true;
      SendError(*reply_, still);
      return false;
    }
    if (SteadyNow() >= until_) SendLocked(202, comes);
    return true;
  }

  void End(const absl::Status& here) {
    const absl::Status told = visit_->Told(here);
    visit_->Log("warm", told);
    absl::MutexLock lock(&mu_);
    if (over_) return;
    if (told.ok()) return SendLocked(200, {});
    over_ = true;
    SendError(*reply_, told);
  }

 private:
  void SendLocked(int status, const kvstore::ContextComes& comes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    over_ = true;
    json value = {{"object", "context"}, {"name", name_}, {"resident", status == 200}};
    if (status != 200) {
      value["bytes"] = comes.bytes;
      value["of"] = comes.of;
      value["waits_for_room"] = comes.waits_for_room;
    }
    reply_->Send(status, kJson, DumpJson(value));
  }

  const std::shared_ptr<HttpReply> reply_;
  const std::shared_ptr<kvstore::Visit> visit_;
  const std::string name_;
  const absl::Time until_;
  absl::Mutex mu_;
  bool over_ ABSL_GUARDED_BY(mu_) = false;
};

// Seconds that a request says it waits: ?wait=
absl::StatusOr<double> WaitOf(const std::string& query) {
  constexpr double kMostSeconds = 600;
  const std::string given = QueryParameter(query, "wait");
  double seconds = 0;
  if (!given.empty() &&
      (!absl::SimpleAtod(given, &seconds) || !(seconds >= 0 && seconds <= kMostSeconds))) {
    return WithParam(
        absl::InvalidArgumentError(absl::StrCat("wait=", Shown(given, 64),
                                                ": must be seconds in [0, ", kMostSeconds, "]")),
        "wait");
  }
  return seconds;
}

// Of two threads: the one that tells of the document, and the one that looks whether its caller may still know.
class EventStream {
 public:
  EventStream(std::shared_ptr<HttpReply> reply, std::shared_ptr<kvstore::Visit> visit)
      : reply_(std::move(reply)), visit_(std::move(visit)) {}

  bool Tell(const serving::Document& document) {
    absl::MutexLock lock(&mu_);
    if (over_) return false;
    Begin();
    if (const std::string event = EventOf(document); event != told_) {
      reply_->Write(event);
      told_ = event;
    }
    if (document.state == serving::DocumentState::kReady ||
        document.state == serving::DocumentState::kFailed) {
      reply_->Write(kDoneEvent);
      End();
    }
    over_ = over_ || reply_->gone();
    return !over_;
  }

  bool LookAgain() {
    absl::MutexLock lock(&mu_);
    if (over_ || reply_->gone()) return false;
    const absl::Status still = visit_->StillAllowed();
    if (still.ok()) return true;
    Begin();
    reply_->Write(ErrorEvent(still));
    End();
    return false;
  }

 private:
  void Begin() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!begun_) reply_->Begin("text/event-stream; charset=utf-8");
    begun_ = true;
  }
  void End() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    reply_->End();
    over_ = true;
  }

  const std::shared_ptr<HttpReply> reply_;
  const std::shared_ptr<kvstore::Visit> visit_;
  absl::Mutex mu_;
  std::string told_ ABSL_GUARDED_BY(mu_);
  bool begun_ ABSL_GUARDED_BY(mu_) = false, over_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace

serving::Documents::Sees SeenBy(kvstore::Principal* who) {
  return [who](const std::string& name) { return who == nullptr || who->Sees(name); };
}

absl::Status MayBring(const kvstore::Principal& who, const std::string& name) {
  RETURN_IF_ERROR(who.Check(kvstore::Right::kImport));
  if (who.Sees(name)) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("key ", who.name(), " may not add context ", name, " any more"));
}

serving::Documents::Bringer BroughtBy(const std::shared_ptr<kvstore::Visit>& visit,
                                      std::shared_ptr<void> place) {
  serving::Documents::Bringer by;
  by.sees = [who = visit->shared_principal()](const std::string& name) { return who->Sees(name); };
  by.place = std::move(place);
  if (!visit->of_keys()) return by;  // nothing can be withdrawn
  by.who = visit->principal().name();
  by.tenant = visit->principal().tenant_name();
  by.still = [visit](const std::string& name) {
    RETURN_IF_ERROR(visit->StillAllowed());
    return MayBring(visit->principal(), name);
  };
  return by;
}

absl::Status ContextsApi::Handle(const HttpRequest& request, const HttpRoute& route,
                                 const std::string& name,
                                 const std::shared_ptr<kvstore::Visit>& visit,
                                 const std::shared_ptr<HttpReply>& reply) const {
  serving::Documents* const documents = engine->documents();
  if (documents == nullptr) {
    return absl::FailedPreconditionError("there is no store: carrel api needs --store FOLDER");
  }
  const absl::string_view pattern = route.pattern, method = route.method;
  if (pattern == kTarget && method == "POST") return Create(request, visit, *reply);
  if (pattern == kTarget) return SendAll(visit->principal(), *reply);
  if (absl::EndsWith(pattern, "/warm")) return Warm(request.at.query, visit, reply);
  const absl::StatusOr<serving::Document> document = documents->Get(visit->lookup_name());
  RETURN_IF_ERROR(visit->Told(document.status()));
  if (absl::EndsWith(pattern, "/events")) {
    const auto stream = std::make_shared<EventStream>(reply, visit);
    still_allowed->Watch([weak = std::weak_ptr<EventStream>(stream)] {
      const auto held = weak.lock();
      return held != nullptr && held->LookAgain();
    });
    return documents->Watch(name,
                            [stream](const serving::Document& now) { return stream->Tell(now); });
  }
  if (absl::EndsWith(pattern, "/text"))
    return AnswerText(*document, request.at.query, visit, reply);
  if (method == "DELETE") {
    const absl::Status deleted = documents->Delete(name);
    visit->Log("delete", deleted, {document->content_id, document->tokens, document->bytes});
    RETURN_IF_ERROR(deleted);
    reply->Send(200, kJson,
                DumpJson(json{{"name", name}, {"object", "context"}, {"deleted", true}}));
  } else {
    reply->Send(200, kJson, DumpJson(JsonOf(*document)));
  }
  return absl::OkStatus();
}

absl::Status ContextsApi::SendAll(const kvstore::Principal& who, HttpReply& reply) const {
  ASSIGN_OR_RETURN(const std::vector<serving::Document> all, engine->documents()->List());
  json data = json::array();
  for (const serving::Document& document : all) {
    if (who.Sees(document.name)) data.push_back(JsonOf(document));
  }
  reply.Send(200, kJson, DumpJson(json{{"object", "list"}, {"data", std::move(data)}}));
  return absl::OkStatus();
}

absl::Status ContextsApi::SendText(const serving::Document& document, const kvstore::Visit& visit,
                                   HttpReply& reply) const {
  const absl::StatusOr<std::string> text = TextOf(document);
  visit.Log("tokens", text.status(), {document.content_id, document.tokens, document.bytes});
  RETURN_IF_ERROR(text.status());
  reply.Send(200, "text/plain; charset=utf-8", *text);
  return absl::OkStatus();
}

absl::StatusOr<std::string> ContextsApi::TextOf(const serving::Document& document) const {
  if (!document.usable) {
    return absl::FailedPreconditionError(absl::StrCat(
        "context \"", document.name,
        "\" was made by another model, or its keys are stored otherwise than this server "
        "reads them: it cannot be asked here, nor its text be read"));
  }
  ASSIGN_OR_RETURN(const library::DocumentText text,
                   engine->Document(document.name, document.content_id));
  return text.text();
}

void ContextsApi::BringAndSendText(const serving::Document& document,
                                   const std::shared_ptr<kvstore::Visit>& visit,
                                   const std::shared_ptr<HttpReply>& reply) const {
  brings->Bring(document.name,
                {.progress = [reply](const kvstore::ContextComes&) { return !reply->gone(); },
                 .done =
                     [api = *this, document, visit, reply](const absl::Status& here,
                                                           std::shared_ptr<void> hold) {
                       if (!here.ok()) return SendError(*reply, here);
                       api.SendTextLater(document, visit, reply, std::move(hold));
                     }});
}

void ContextsApi::SendTextLater(const serving::Document& document,
                                const std::shared_ptr<kvstore::Visit>& visit,
                                const std::shared_ptr<HttpReply>& reply,
                                std::shared_ptr<void> hold) const {
  const bool begun = later(visit->turn(), [api = *this, document, visit, reply, hold] {
    absl::Status sent = visit->StillAllowed();
    if (sent.ok()) sent = api.SendText(document, *visit, *reply);
    if (!sent.ok()) SendError(*reply, sent);
  });
  if (!begun) SendError(*reply, absl::UnavailableError("the server is stopping"));
}

absl::Status ContextsApi::Warm(const std::string& query,
                               const std::shared_ptr<kvstore::Visit>& visit,
                               const std::shared_ptr<HttpReply>& reply) const {
  ASSIGN_OR_RETURN(const double seconds, WaitOf(query));
  const std::string& name = visit->lookup_name();
  const auto answer =
      std::make_shared<WarmAnswer>(reply, visit, name, SteadyNow() + absl::Seconds(seconds));
  if (!engine->store()->brings()) {
    const absl::StatusOr<serving::Document> document = engine->documents()->Get(name);
    RETURN_IF_ERROR(visit->Told(document.status()));
    if (document->state != serving::DocumentState::kReady) return serving::BeingRead(*document);
    answer->End(absl::OkStatus());
    return absl::OkStatus();
  }
  brings->Bring(
      name,
      {.later = true,
       .progress = [answer](const kvstore::ContextComes& comes) { return answer->Tell(comes); },
       .done = [answer](const absl::Status& here, std::shared_ptr<void>) { answer->End(here); }});
  if (seconds == 0) (void)answer->Tell({});
  return absl::OkStatus();
}

absl::Status ContextsApi::AnswerText(const serving::Document& document, const std::string& query,
                                     const std::shared_ptr<kvstore::Visit>& visit,
                                     const std::shared_ptr<HttpReply>& reply) const {
  ASSIGN_OR_RETURN(const double seconds, WaitOf(query));
  if (document.state == serving::DocumentState::kReady && engine->store()->brings()) {
    BringAndSendText(document, visit, reply);
    return absl::OkStatus();
  }
  if (document.state == serving::DocumentState::kReady) return SendText(document, *visit, *reply);
  if (document.state == serving::DocumentState::kFailed) return document.error;
  if (seconds == 0) return serving::BeingRead(document);
  const absl::Time until = SteadyNow() + absl::Seconds(seconds);
  // The first answer is the one: what comes later is not sent.
  still_allowed->Watch([weak = std::weak_ptr<HttpReply>(reply), visit] {
    const auto held = weak.lock();
    if (held == nullptr || held->gone()) return false;
    const absl::Status still = visit->StillAllowed();
    if (!still.ok()) SendError(*held, still);
    return still.ok();
  });
  return engine->documents()->Watch(
      document.name, [api = *this, visit, reply, until](const serving::Document& now) {
        if (now.state == serving::DocumentState::kReady) {
          api.SendTextLater(now, visit, reply, nullptr);
        } else if (now.state == serving::DocumentState::kFailed) {
          SendError(*reply, now.error);
        } else if (SteadyNow() > until) {
          SendError(*reply, serving::BeingRead(now));
        } else {
          return !reply->gone();
        }
        return false;
      });
}

// A name that the caller would not see afterwards is refused before anybody looks whether it is taken.
absl::StatusOr<std::shared_ptr<void>> TakePlace(serving::Engine& engine, const std::string& name,
                                                int64_t tokens, kvstore::Principal* who) {
  if (who == nullptr) return std::shared_ptr<void>();
  if (name.empty() ? !who->SeesAll() : !who->Sees(name)) {
    return WithParam(absl::PermissionDeniedError(absl::StrCat(
                         "name=", name, ": this key may not make a context of this name")),
                     "name");
  }
  if (!who->OfTenant(name)) return std::shared_ptr<void>();
  const int64_t expected = serving::ExpectedBytes(engine.checkpoint().config, tokens);
  return engine.documents()->TakePlace(
      [&](const std::string& other) { return who->OfTenant(other); },
      [&](int64_t contexts, int64_t bytes) -> absl::StatusOr<std::shared_ptr<void>> {
        ASSIGN_OR_RETURN(std::shared_ptr<kvstore::TenantState> place,
                         who->TakeImport(contexts, bytes, expected));
        return std::shared_ptr<void>(std::move(place));
      });
}

absl::Status ContextsApi::Create(const HttpRequest& request,
                                 const std::shared_ptr<kvstore::Visit>& visit,
                                 HttpReply& reply) const {
  kvstore::Principal* const who = &visit->principal();
  ASSIGN_OR_RETURN(const GivenDocument given, ReadDocument(request, request.at.query));
  RETURN_IF_ERROR(WithParam(visit->AllowNew(given.name), "name"));
  if (static_cast<int64_t>(given.text.size()) > max_text_bytes) {
    return WithHttpStatus(
        WithParam(absl::InvalidArgumentError(absl::StrCat(
                      "text: the document has ", given.text.size(), " bytes: must be at most ",
                      max_text_bytes, " (--max-document-bytes)")),
                  "text"),
        413);
  }
  std::string head;
  if (given.in_turn) {
    ASSIGN_OR_RETURN(head, engine->turn_head());
  }
  model::Tokenizer::Dropped dropped;
  absl::StatusOr<std::vector<TokenId>> tokens = library::EncodeGivenText(
      *engine->checkpoint().tokenizer, head, given.text, given.drop_missing ? &dropped : nullptr);
  if (!tokens.ok()) return WithParam(Annotate(tokens.status(), "text"), "text");
  ASSIGN_OR_RETURN(std::shared_ptr<void> place,
                   TakePlace(*engine, given.name, static_cast<int64_t>(tokens->size()), who));
  const auto count = static_cast<int64_t>(tokens->size());
  const absl::StatusOr<serving::Documents::Added> added =
      engine->documents()->Add(given.name, *std::move(tokens), BroughtBy(visit, std::move(place)));
  visit->Log("import", added.status(), {.tokens = count});
  RETURN_IF_ERROR(added.status());
  json value = JsonOf(added->document);
  value["existed"] = added->existed;
  if (!given.remark.empty()) value["remark"] = given.remark;
  if (dropped.bytes > 0) {
    value["dropped"] = {{"bytes", dropped.bytes},
                        {"first_offset", dropped.first_offset},
                        {"first_byte", dropped.first_byte}};
  }
  reply.Send(added->existed ? 200 : 202, kJson, DumpJson(value));
  return absl::OkStatus();
}

}  // namespace carrel::http_api
