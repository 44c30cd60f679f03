#include "serving/engine.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "decoder/config.h"
#include "kvstore/service/context_client.h"
#include "serving/chat_probe.h"

namespace carrel::serving {

absl::StatusOr<std::unique_ptr<Engine>> Engine::Start(EngineConfig config,
                                                      std::shared_ptr<library::LoadedModel> model,
                                                      std::shared_ptr<library::StoreAccess> store) {
  std::unique_ptr<Engine> engine(new Engine(std::move(config), std::move(model), std::move(store)));
  RETURN_IF_ERROR(engine->Begin());
  return engine;
}

Engine::~Engine() { documents_ = nullptr; }

absl::Status Engine::Begin() {
  SchedulerConfig scheduler = config_.scheduler;
  scheduler.decoders.turn_head = [this] { return turn_head().value_or(""); };
  scheduler_ = Scheduler::Create(std::move(scheduler), model_, store_);
  if (!config_.documents.has_value() || store_ == nullptr) return absl::OkStatus();
  DocumentsConfig documents = *config_.documents;
  documents.retrieval = config_.scheduler.decoders.config;
  documents.derived_weights = config_.scheduler.decoders.derived_weights;
  documents.probe = [this](absl::Span<const TokenId> document) {
    return ChatProbe(chat().value_or(nullptr), *checkpoint().tokenizer, document);
  };
  ASSIGN_OR_RETURN(documents_, Documents::Create(documents, model_, store_, scheduler_.get()));
  if (config_.documents_by != nullptr) {
    documents_ = config_.documents_by(std::move(documents_), scheduler_.get());
  }
  return absl::OkStatus();
}

absl::StatusOr<OpenedContext> Engine::Find(const std::string& context) const {
  if (store_ == nullptr) {
    return absl::NotFoundError(absl::StrCat("no context \"", context, "\""));
  }
  ASSIGN_OR_RETURN(const auto client, store_->NewContextClient(context));
  ASSIGN_OR_RETURN(const v1::Manifest manifest, client->Get(context));
  return OpenedContext{.content_id = manifest.content_id(), .tokens = manifest.tokens()};
}

absl::StatusOr<model::Seam> Engine::Encode(const Prompt& prompt, const std::string& context,
                                           const std::string& content_id,
                                           model::Tokenizer::Dropped* dropped) {
  const bool is_chat = !prompt.messages.empty();
  ChatTemplate* chat_template = nullptr;
  if (is_chat) {
    ASSIGN_OR_RETURN(chat_template, chat());
  }
  const model::Tokenizer* const tokenizer = checkpoint().tokenizer.get();
  if (context.empty() || tokenizer == nullptr) {
    model::Seam alone;
    ASSIGN_OR_RETURN(alone.tokens,
                     is_chat ? chat_template->Encode(prompt.messages, *tokenizer, prompt.chat)
                             : checkpoint().EncodeDocument(prompt.text, dropped));
    return alone;
  }
  ASSIGN_OR_RETURN(const library::DocumentEnds document, ends_.Of(context, content_id, *store_));
  const int64_t most = std::min(most_given_up(), document.tokens);
  if (!is_chat) return model::JoinTokens(*tokenizer, document.last, most, prompt.text, dropped);
  return chat_template->EncodeBehind(prompt.messages, *tokenizer, document, most, prompt.chat);
}

absl::StatusOr<library::DocumentText> Engine::Document(const std::string& context,
                                                       const std::string& content_id) {
  ASSIGN_OR_RETURN(std::vector<TokenId> tokens, store_->DocumentTokens(context, content_id));
  ASSIGN_OR_RETURN(const std::string head, turn_head());
  return library::DocumentText::Create(std::move(tokens), *checkpoint().tokenizer, head);
}

absl::StatusOr<AnswerJob::Done> Engine::Answer(AnswerJob job) {
  absl::Notification ended;
  absl::StatusOr<AnswerJob::Done> done;
  job.done = [&](absl::StatusOr<AnswerJob::Done> how) {
    done = std::move(how);
    ended.Notify();
  };
  RETURN_IF_ERROR(Submit(std::move(job)));
  ended.WaitForNotification();
  return done;
}

absl::StatusOr<ChatTemplate*> Engine::chat() {
  absl::call_once(chat_once_, [this] {
    if (checkpoint().tokenizer == nullptr) {
      chat_ = absl::NotFoundError("the model came without a tokenizer");
    } else {
      chat_ = ChatTemplate::Load(model_->path(), checkpoint());
    }
  });
  RETURN_IF_ERROR(chat_.status());
  return chat_->get();
}

absl::StatusOr<std::string> Engine::turn_head() {
  absl::call_once(head_once_, [this] {
    const absl::StatusOr<ChatTemplate*> known = chat();
    turn_head_ = known.ok() ? (*known)->TurnHead() : "";
  });
  return turn_head_;
}

int64_t Engine::most_given_up() const {
  return decoder::MostGivenUp(config_.scheduler.decoders.config, config_.scheduler.decoders.device,
                              std::numeric_limits<int64_t>::max());
}

bool Engine::beyond_trained() const {
  const decoder::RetrievalConfig& retrieval = config_.scheduler.decoders.config;
  return retrieval.beyond_trained || retrieval.rope == decoder::Rope::kInfiniteHip;
}

}  // namespace carrel::serving
