#include "http_api/completions_api.h"

#include <spdlog/spdlog.h>

#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "common/shown.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "http_api/api_error.h"
#include "http_api/contexts_api.h"
#include "kvstore/access/access.h"
#include "kvstore/access/kept_name.h"
#include "serving/prefix_cache.h"

namespace carrel::http_api {
namespace {

// The first tokens of the prompt are those of a context, which has their rows.
void TakeFront(serving::AnswerJob& job, size_t tokens) {
  const auto end = job.prompt.begin() + static_cast<std::ptrdiff_t>(tokens);
  job.history.assign(job.prompt.begin(), end);
  job.prompt.erase(job.prompt.begin(), end);
}

serving::Prompt PromptOf(const CompletionRequest& request) {
  return {request.messages, request.chat, request.prompt};
}

}  // namespace

// What is known of a request while it is answered.
struct CompletionsApi::Asked {
  bool chat = false;
  CompletionRequest request;
  std::shared_ptr<kvstore::Principal> who;
  std::shared_ptr<kvstore::Visit> visit;
  std::shared_ptr<Answering> answering;
};

CompletionsApi::CompletionsApi(Parts parts)
    : parts_(std::move(parts)), started_(std::random_device{}()) {}

absl::Status CompletionsApi::Handle(bool chat, const HttpRequest& http,
                                    const std::shared_ptr<kvstore::Visit>& visit,
                                    const std::shared_ptr<HttpReply>& reply) {
  Asked asked = {.chat = chat, .who = visit->shared_principal(), .visit = visit};
  ASSIGN_OR_RETURN(asked.request, ParseCompletion(chat, http.body));
  const CompletionRequest& request = asked.request;
  serving::Engine& engine = *parts_.engine;
  RETURN_IF_ERROR(WithParam(CheckModel(request.model), "model"));
  RETURN_IF_ERROR(visit->Allow(visit->rpc(), request.context));
  ASSIGN_OR_RETURN(std::shared_ptr<void> place, visit->TakeSession());
  CompletionHead head;
  head.chat = chat;
  head.id = NewId(chat);
  head.created_unix_s = absl::ToUnixSeconds(absl::Now());
  head.model = request.model.empty() ? parts_.model_name : request.model;
  asked.answering =
      std::make_shared<Answering>(std::move(head), request, reply, visit,
                                  std::vector<std::shared_ptr<void>>{std::move(place), http.held});
  parts_.still_allowed->Watch([weak = std::weak_ptr<Answering>(asked.answering)] {
    const std::shared_ptr<Answering> answering = weak.lock();
    return answering != nullptr && answering->LookAgain();
  });
  for (const auto& [field, name] : request.template_fields) {
    const absl::StatusOr<serving::ChatTemplate*> known = engine.chat();
    if (known.ok() && !(*known)->Mentions(name)) asked.answering->Ignore(field);
  }
  const absl::StatusOr<serving::OpenedContext> found =
      FindContext(request.context, asked.who.get());
  if (!absl::IsNotFound(found.status()) || engine.documents() == nullptr) {
    RETURN_IF_ERROR(WithParam(found.status(), "context"));
    if (request.context.empty() || !engine.store()->brings()) return Answer(asked, *found);
    BringAndAnswer(asked, *found);
    return absl::OkStatus();
  }
  const absl::Status missing = WithParam(found.status(), "context");
  if (asked.who != nullptr && !asked.who->Sees(request.context)) return missing;
  const absl::StatusOr<serving::Document> document = engine.documents()->Get(request.context);
  if (!document.ok()) return missing;
  if (document->state == serving::DocumentState::kReady) {  // by now
    return Answer(asked, {.content_id = document->content_id, .tokens = document->tokens});
  }
  if (document->state == serving::DocumentState::kFailed) {
    return WithParam(
        absl::FailedPreconditionError(absl::StrCat(
            "context \"", document->name, "\" could not be read: ", document->error.message())),
        "context");
  }
  if (request.wait_s == 0) return WithParam(serving::BeingRead(*document), "context");
  return Wait(asked, *document);
}

// The answer begins when the document is there, on another thread: watchers must not take long.
absl::Status CompletionsApi::Wait(const Asked& asked, const serving::Document& now) {
  const absl::Time until = SteadyNow() + absl::Seconds(asked.request.wait_s);
  return parts_.engine->documents()->Watch(
      now.name, [this, asked, until](const serving::Document& document) {
        Answering& answering = *asked.answering;
        if (document.state == serving::DocumentState::kFailed) {
          answering.Failed(document.error);
          return false;
        }
        if (document.state == serving::DocumentState::kReady) {
          AnswerLater(asked, {.content_id = document.content_id, .tokens = document.tokens});
          return false;
        }
        if (SteadyNow() > until) {
          answering.Failed(WithParam(serving::BeingRead(document), "context"));
          return false;
        }
        answering.Waits(document);
        return answering.Wanted();
      });
}

// The answer takes a place once its context is here, and keeps it here.
void CompletionsApi::BringAndAnswer(const Asked& asked, const serving::OpenedContext& found) {
  parts_.brings->Bring(
      asked.request.context,
      {.progress =
           [answering = asked.answering](const kvstore::ContextComes& comes) {
             answering->Fetches(comes);
             return answering->Wanted();
           },
       .done =
           [this, asked, found](const absl::Status& here, std::shared_ptr<void> hold) {
             if (!here.ok()) return asked.answering->Failed(WithParam(here, "context"));
             asked.answering->Hold(std::move(hold));
             AnswerLater(asked, found);
           }});
}

void CompletionsApi::AnswerLater(const Asked& asked, const serving::OpenedContext& found) {
  const bool begun = parts_.later(asked.visit->turn(), [this, asked, found] {
    const absl::Status status = Answer(asked, found);
    if (!status.ok()) asked.answering->Failed(status);
  });
  if (!begun) asked.answering->Failed(absl::UnavailableError("the server is stopping"));
}

absl::Status CompletionsApi::CheckModel(const std::string& model) const {
  const std::string name = model.substr(0, model.find('@'));
  if (name.empty() || name == parts_.model_name) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("no model ", "\"", Shown(name), "\": there is \"",
                                          parts_.model_name, "\" (GET /v1/models)"));
}

absl::StatusOr<serving::OpenedContext> CompletionsApi::FindContext(const std::string& name,
                                                                   kvstore::Principal* who) const {
  if (name.empty()) return serving::OpenedContext();
  const absl::Status missing = absl::NotFoundError(absl::StrCat("no context \"", name, "\""));
  if (who != nullptr && !who->Sees(name)) return missing;
  absl::StatusOr<serving::OpenedContext> found = parts_.engine->Find(name);
  return absl::IsNotFound(found.status()) ? missing : std::move(found);
}

absl::Status CompletionsApi::CheckLength(const Asked& asked, int64_t document,
                                         int64_t prompt) const {
  const int64_t most = parts_.engine->max_tokens();
  if (document + prompt <= most) return absl::OkStatus();
  const char* const field = asked.chat ? "messages" : "prompt";
  std::string words = absl::StrCat(field, ": ", prompt, " tokens");
  if (document > 0) {
    absl::StrAppend(&words, " behind the ", document, " of context \"", asked.request.context,
                    "\": ", document + prompt, " in all");
  }
  return WithCode(
      WithParam(absl::InvalidArgumentError(absl::StrCat(
                    words, ": must be at most the model's ", most, " (",
                    parts_.engine->max_tokens_field(), "), which the answer is among: shorten it")),
                field),
      kContextLengthExceeded);
}

// As the request says; what it does not say, as the model's makers advise; else at temperature 1.
void CompletionsApi::SetSampling(const Asked& asked, serving::AnswerJob& job) const {
  const RequestedSampling& wanted = asked.request.sampling;
  const model::GenerationDefaults& advice = parts_.engine->checkpoint().generation_defaults;
  serving::Sampling& sampling = job.sampling;
  sampling = decoder::AdvisedSampling(advice, {.temperature = 1});
  std::vector<std::string> advised;
  const auto take = [&](const char* name, const auto& said, bool is_advised, auto& into) {
    if (said.has_value()) {
      into = *said;
    } else if (is_advised) {
      advised.push_back(name);
    }
  };
  take("temperature", wanted.temperature, advice.samples().has_value(), sampling.temperature);
  take("top_p", wanted.top_p, advice.top_p.has_value(), sampling.top_p);
  take("top_k", wanted.top_k, advice.top_k.has_value(), sampling.top_k);
  take("min_p", wanted.min_p, advice.min_p.has_value(), sampling.min_p);
  take("repetition_penalty", wanted.repetition_penalty, advice.repetition_penalty.has_value(),
       sampling.repetition_penalty);
  sampling.seed = wanted.seed;
  asked.answering->SetSampling(sampling, std::move(advised));
}

// How many tokens of the prompt are those of a document that is worth a context; 0: none are.
size_t CompletionsApi::DocumentTokens(const Asked& asked, const std::vector<TokenId>& prompt) {
  const auto least = static_cast<size_t>(parts_.keep_tokens);
  if (parts_.keep == 0 || prompt.size() < least) return 0;
  std::optional<CompletionRequest> document = DocumentPart(asked.request);
  if (!document.has_value()) return 0;
  const absl::StatusOr<model::Seam> part =
      parts_.engine->Encode(PromptOf(*std::move(document)), "", "");
  if (!part.ok()) return 0;
  const size_t same = serving::CommonPrefix(part->tokens, prompt);
  return same >= least && same < prompt.size() ? same : 0;
}

absl::Status CompletionsApi::Answer(const Asked& asked, const serving::OpenedContext& found) {
  const CompletionRequest& request = asked.request;
  serving::AnswerJob job;
  job.context = request.context;
  job.content_id = found.content_id;
  serving::Engine& engine = *parts_.engine;
  ASSIGN_OR_RETURN(model::Seam seam, engine.Encode(PromptOf(request), job.context, job.content_id));
  job.prompt = std::move(seam.tokens);
  job.give_up = seam.give_up;
  RETURN_IF_ERROR(
      CheckLength(asked, found.tokens - job.give_up, static_cast<int64_t>(job.prompt.size())));
  job.max_tokens = request.max_tokens;
  job.sources = request.sources;
  job.stop = request.stop;
  if (asked.who != nullptr) job.who = asked.who->name();
  job.turn = asked.visit->turn();
  SetSampling(asked, job);
  const std::shared_ptr<Answering>& answering = asked.answering;
  job.wanted = [answering] { return answering->Wanted(); };
  job.on_text = [answering](const std::string& piece) { return answering->Push(piece); };
  job.done = [answering](const absl::StatusOr<serving::AnswerJob::Done>& done) {
    answering->Done(done);
  };
  if (job.context.empty() && engine.documents() != nullptr) {
    auto known =
        engine.documents()->Recognise(job.prompt, engine.most_given_up(), SeenBy(asked.who.get()));
    if (known.has_value() && engine.store()->store() != nullptr && engine.store()->brings()) {
      std::shared_ptr<void> here = parts_.brings->HoldIfHere(known->name);
      if (here == nullptr) known.reset();  // it went meanwhile
      answering->Hold(std::move(here));
    }
    if (known.has_value()) {
      job.context = known->name;
      job.content_id = known->content_id;
      TakeFront(job, job.prompt.size() - known->prompt.rest.size());
      job.give_up = known->prompt.give_up;
    } else if (const size_t keep = DocumentTokens(asked, job.prompt); keep > 0) {
      const absl::Status kept = AnswerFromKept(asked, job, keep);
      if (kept.ok()) return kept;
      spdlog::warn("a prompt's document of {} tokens is not kept: {}", keep,
                   std::string(kept.message()));
      answering->NotKept(std::string(kept.message()));
    }
  }
  answering->SetPrompt(job.context, request.context.empty() && !job.context.empty(),
                       static_cast<int64_t>(job.prompt.size()));
  return engine.Submit(std::move(job));
}

// The first `keep` tokens of the prompt become a context of its own, and the answer comes from there. Not OK: why
// that cannot be; nothing was done, and it is answered without.
absl::Status CompletionsApi::AnswerFromKept(const Asked& asked, const serving::AnswerJob& job,
                                            size_t keep) {
  const std::vector<TokenId> document(job.prompt.begin(),
                                      job.prompt.begin() + static_cast<std::ptrdiff_t>(keep));
  kvstore::Principal* const who = asked.who.get();
  const std::string name =
      kvstore::KeptName(who == nullptr ? "" : who->prefix(), who == nullptr ? "" : who->name(),
                        serving::DigestOf(document));
  if (who != nullptr) {
    RETURN_IF_ERROR(who->Check(kvstore::Right::kImport));
    if (!who->Sees(name)) {
      return absl::PermissionDeniedError(
          absl::StrCat("this key would not see a context of the name ", name));
    }
  }
  ASSIGN_OR_RETURN(std::shared_ptr<void> place,
                   TakePlace(*parts_.engine, name, static_cast<int64_t>(keep), who));
  serving::Documents& documents = *parts_.engine->documents();
  ASSIGN_OR_RETURN(const serving::Documents::Added added,
                   documents.Keep(name, document, BroughtBy(asked.visit, std::move(place))));
  return documents.Watch(added.document.name, [this, answering = asked.answering, keep,
                                               job](const serving::Document& now) {
    if (now.state == serving::DocumentState::kReady) {
      serving::AnswerJob rest = job;
      rest.context = now.name;
      rest.content_id = now.content_id;
      TakeFront(rest, keep);
      answering->SetPrompt(rest.context, /*recognised=*/true,
                           static_cast<int64_t>(rest.prompt.size()));
      Submit(std::move(rest), *answering);
      return false;
    }
    if (now.state == serving::DocumentState::kFailed) {
      answering->NotKept(std::string(now.error.message()));
      answering->SetPrompt("", false, static_cast<int64_t>(job.prompt.size()));
      Submit(job, *answering);
      return false;
    }
    answering->Waits(now);
    return answering->Wanted();
  });
}

void CompletionsApi::Submit(serving::AnswerJob job, Answering& answering) {
  if (const absl::Status status = parts_.engine->Submit(std::move(job)); !status.ok()) {
    answering.Failed(status);
  }
}

std::string CompletionsApi::NewId(bool chat) {
  return absl::StrFormat("%s-%08x%08x", chat ? "chatcmpl" : "cmpl", started_, ++answers_);
}

}  // namespace carrel::http_api
