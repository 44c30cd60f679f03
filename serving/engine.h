// What:   answers from the contexts of one store by one model: what whoever asks stands on, a program with one question
//         as a service of many. It owns the scheduler and what that knows of prompts, the documents that clients bring,
//         and the model's chat template.
// Errors: Start: as documents.h. Open, Answer: as runner.h and scheduler.h. Encode: as chat_template.h, and
//         library/document_ends.h.
// Threads: any. A job's callbacks: as answer_job.h.
// Ownership: keeps model and store.
// Cost:   two threads. Chat template and documents' ends are read when they are first needed.
// Example: ASSIGN_OR_RETURN(const auto engine, Engine::Start({}, model, store));
//          ASSIGN_OR_RETURN(const OpenedContext context, engine->Open("novel", "", /*count=*/1));
//          ASSIGN_OR_RETURN(const model::Seam prompt, engine->Encode({.text = "Who?"}, "novel", context.content_id));
//          ASSIGN_OR_RETURN(const AnswerJob::Done answer, engine->Answer(std::move(job)));
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/call_once.h"
#include "absl/status/statusor.h"
#include "library/document_ends.h"
#include "library/document_text.h"
#include "library/loaded_model.h"
#include "library/store_access.h"
#include "model/tokenizer/seam.h"
#include "model/tokenizer/tokenizer.h"
#include "serving/answer_job.h"
#include "serving/chat_template.h"
#include "serving/documents.h"
#include "serving/scheduler.h"

namespace carrel::serving {

struct EngineConfig {
  SchedulerConfig scheduler;
  // How documents are taken, of which prompts are recognised, too; retrieval, derived_weights and probe are the
  // engine's to say. None, or without a store: there are none.
  std::optional<DocumentsConfig> documents;
  // Puts others before the store's own: those that become jobs of a bucket (job_documents.h). Null: none.
  std::function<std::unique_ptr<Documents>(std::unique_ptr<Documents>, Scheduler*)> documents_by;
};

// What follows a context's document, or stands alone: messages of a chat, or a text as it is.
struct Prompt {
  std::vector<Message> messages;
  ChatOptions chat;
  std::string text;  // where there are no messages
};

class Engine {
 public:
  // store: null: there are no contexts.
  static absl::StatusOr<std::unique_ptr<Engine>> Start(EngineConfig config,
                                                       std::shared_ptr<library::LoadedModel> model,
                                                       std::shared_ptr<library::StoreAccess> store);
  ~Engine();  // documents that are being made end first, then answers

  // So many decoders over the context, or of the model alone, as Scheduler::Open.
  absl::StatusOr<OpenedContext> Open(const std::string& context, const std::string& content_id,
                                     int64_t count) {
    return scheduler_->Open(context, content_id, count);
  }
  // The context as the store has it; it need not be open. NotFound: the store says so, or there is none.
  absl::StatusOr<OpenedContext> Find(const std::string& context) const;

  // The tokens of a prompt: behind a context, with its document those of the whole text, where that can be. Without one:
  // those of a document. dropped: as Tokenizer::Encode, of a text.
  absl::StatusOr<model::Seam> Encode(const Prompt& prompt, const std::string& context,
                                     const std::string& content_id,
                                     model::Tokenizer::Dropped* dropped = nullptr);

  // The text of a context's document; content_id: as StoreAccess::DocumentTokens.
  absl::StatusOr<library::DocumentText> Document(const std::string& context,
                                                 const std::string& content_id);

  absl::Status Submit(AnswerJob job) { return scheduler_->Submit(std::move(job)); }
  // Waits for the answer; done of the job is not told.
  absl::StatusOr<AnswerJob::Done> Answer(AnswerJob job);

  // The model's template; NotFound: it knows no chats.
  absl::StatusOr<ChatTemplate*> chat();
  // What stands before a document's text in the first turn of a chat; empty: nothing, as of a model without chats.
  absl::StatusOr<std::string> turn_head();

  // Of all decoders that are open, over all answers so far; while none is on its way.
  decoder::Statistics statistics() const { return scheduler_->statistics(); }

  const model::Checkpoint& checkpoint() const { return model_->checkpoint(); }
  library::StoreAccess* store() const { return store_.get(); }
  Scheduler& scheduler() { return *scheduler_; }
  Documents* documents() { return documents_.get(); }  // null: there are none
  // As a prompt behind a long document may give up tokens of it; how long document, prompt and answer may be, and which
  // field of the model says so.
  int64_t most_given_up() const;
  int64_t max_tokens() const { return checkpoint().config.MaxTokens(beyond_trained()); }
  const char* max_tokens_field() const {
    return checkpoint().config.MaxTokensField(beyond_trained());
  }

 private:
  Engine(EngineConfig config, std::shared_ptr<library::LoadedModel> model,
         std::shared_ptr<library::StoreAccess> store)
      : config_(std::move(config)), model_(std::move(model)), store_(std::move(store)) {}

  absl::Status Begin();
  bool beyond_trained() const;

  const EngineConfig config_;
  const std::shared_ptr<library::LoadedModel> model_;
  const std::shared_ptr<library::StoreAccess> store_;
  library::DocumentEndsCache ends_;
  absl::once_flag chat_once_, head_once_;
  absl::StatusOr<std::unique_ptr<ChatTemplate>> chat_;  // chat_once_
  absl::StatusOr<std::string> turn_head_;               // head_once_
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Documents> documents_;  // null: there are none
};

}  // namespace carrel::serving
