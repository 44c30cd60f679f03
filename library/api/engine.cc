#include "carrel/engine.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "common/status.h"
#include "library/api/answering.h"
#include "library/handles.h"
#include "library/status.h"

namespace carrel {
namespace library {
namespace {

class EngineHandle final : public api::Engine {
 public:
  EngineHandle(std::shared_ptr<Model> model, std::shared_ptr<Store> store,
               std::unique_ptr<serving::Engine> engine)
      : model_(std::move(model)), store_(std::move(store)), engine_(std::move(engine)) {}

  Result<Reply> Ask(const Question& question) override {
    return std::move(AskMany({&question, 1})[0]);
  }

  std::vector<Result<Reply>> AskMany(std::span<const Question> questions) override {
    std::vector<Asked> asked(questions.size());
    absl::BlockingCounter left(static_cast<int>(questions.size()));
    for (size_t i = 0; i < questions.size(); ++i) {
      const absl::Status status = Submit(questions[i], left, asked[i]);
      if (status.ok()) continue;
      asked[i].done = status;
      left.DecrementCount();
    }
    left.Wait();
    std::vector<Result<Reply>> replies;
    for (Asked& one : asked) {
      replies.push_back(ToPublic(ReplyOf(std::move(one.done), engine_->checkpoint())));
      if (replies.back().ok()) replies.back()->prompt_tokens = one.prompt_tokens;
    }
    return replies;
  }

 private:
  struct Asked {
    int64_t prompt_tokens = 0;
    absl::StatusOr<serving::AnswerJob::Done> done;
  };

  absl::StatusOr<model::Seam> TokensOf(const Question& question, const std::string& content_id,
                                       std::vector<std::string>& stop) {
    const int given =
        !question.messages.empty() + !question.prompt.empty() + !question.tokens.empty();
    if (given != 1) {
      return absl::InvalidArgumentError("a question has messages, or a prompt, or tokens");
    }
    if (!question.tokens.empty()) return model::Seam{.tokens = question.tokens};
    serving::Prompt prompt = {.text = question.prompt};
    for (const Message& message : question.messages) {
      prompt.messages.push_back({message.role, message.content});
    }
    if (!prompt.messages.empty() && absl::IsNotFound(engine_->chat().status())) {
      prompt.text = serving::PlainChat(std::exchange(prompt.messages, {}));
      stop.emplace_back(serving::kPlainChatStop);
    }
    return engine_->Encode(prompt, question.context, content_id);
  }

  absl::Status Submit(const Question& question, absl::BlockingCounter& left, Asked& asked) {
    ASSIGN_OR_RETURN(const serving::OpenedContext context,
                     engine_->Open(question.context, question.content_id, /*count=*/1));
    std::vector<std::string> stop = question.stop;
    ASSIGN_OR_RETURN(model::Seam prompt, TokensOf(question, context.content_id, stop));
    asked.prompt_tokens = static_cast<int64_t>(prompt.tokens.size());
    serving::AnswerJob job = JobOf(std::move(prompt), question.options, engine_->checkpoint());
    job.context = question.context;
    job.content_id = context.content_id;
    job.stop = std::move(stop);
    job.sources = question.sources;
    job.done = [&asked, &left](absl::StatusOr<serving::AnswerJob::Done> done) {
      asked.done = std::move(done);
      left.DecrementCount();
    };
    return engine_->Submit(std::move(job));
  }

  const std::shared_ptr<Model> model_;
  const std::shared_ptr<Store> store_;
  const std::unique_ptr<serving::Engine> engine_;
};

absl::StatusOr<std::unique_ptr<api::Engine>> StartEngine(std::shared_ptr<Model> model,
                                                         std::shared_ptr<Store> store,
                                                         const EngineOptions& options) {
  if (model == nullptr || store == nullptr) {
    return absl::InvalidArgumentError("an engine needs a model and a store");
  }
  if (!options.reading.content_id.empty()) {
    return absl::InvalidArgumentError("reading.content_id: a question says what its context holds");
  }
  for (const int64_t count : {options.answers, options.open_contexts}) {
    if (count < 1 || count > 1024) {
      return absl::InvalidArgumentError(absl::StrCat("answers=", options.answers,
                                                     ", open_contexts=", options.open_contexts,
                                                     ": outside [1, 1024]"));
    }
  }
  const StoreHandle& handle = StoreHandle::Of(*store);
  ASSIGN_OR_RETURN(DecoderSpec spec, DecoderSpecOf(options.reading, handle.address()));
  ASSIGN_OR_RETURN(
      std::unique_ptr<serving::Engine> engine,
      serving::Engine::Start({.scheduler = {.decoders = std::move(spec),
                                            .max_waiting = INT64_MAX,
                                            .max_answers = options.answers,
                                            .max_open_contexts = options.open_contexts}},
                             ModelHandle::Of(*model).loaded(), handle.access()));
  return std::make_unique<EngineHandle>(std::move(model), std::move(store), std::move(engine));
}

}  // namespace
}  // namespace library

inline namespace api {

Result<std::unique_ptr<Engine>> Engine::Start(std::shared_ptr<Model> model,
                                              std::shared_ptr<Store> store,
                                              const EngineOptions& options) {
  return library::ToPublic(library::StartEngine(std::move(model), std::move(store), options));
}

}  // namespace api
}  // namespace carrel
