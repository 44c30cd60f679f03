#include "carrel/reader.h"

#include <utility>

#include "common/status.h"
#include "library/api/answering.h"
#include "library/handles.h"
#include "library/status.h"

namespace carrel {
namespace library {
namespace {

class ReaderHandle final : public Reader {
 public:
  ReaderHandle(std::shared_ptr<Model> model, std::shared_ptr<Store> store, std::string name,
               serving::OpenedContext context, std::unique_ptr<serving::Engine> engine)
      : model_(std::move(model)),
        store_(std::move(store)),
        name_(std::move(name)),
        context_(std::move(context)),
        engine_(std::move(engine)) {}

  Result<Answer> Generate(std::string_view prompt, const GenerateOptions& options) override {
    absl::StatusOr<model::Seam> seam =
        engine_->Encode({.text = std::string(prompt)}, name_, context_.content_id);
    if (!seam.ok()) return ToPublic(seam.status());
    return ToPublic(Answered(*std::move(seam), options));
  }

  Result<Answer> GenerateFrom(std::span<const Token> prompt,
                              const GenerateOptions& options) override {
    return ToPublic(Answered({.tokens = {prompt.begin(), prompt.end()}}, options));
  }

  ReaderStatistics statistics() const override {
    const decoder::Statistics inside = engine_->statistics();
    ReaderStatistics outside;
    outside.context_tokens = context_.tokens;
    double rows = 0;
    for (const decoder::LayerStatistics& layer : inside.layers)
      rows += decoder::RowsPerToken(layer);
    const model::ModelConfig& model = engine_->checkpoint().config;
    outside.rows_attended = rows / static_cast<double>(model.shape.kv_heads * model.shape.layers);
    outside.promised_error = inside.promised_error;
    outside.bytes_received = inside.bytes_received;
    return outside;
  }

 private:
  absl::StatusOr<Answer> Answered(model::Seam prompt, const GenerateOptions& options) {
    serving::AnswerJob job = JobOf(std::move(prompt), options, engine_->checkpoint());
    job.context = name_;
    job.content_id = context_.content_id;
    job.resume = false;
    return ReplyOf(engine_->Answer(std::move(job)), engine_->checkpoint());
  }

  const std::shared_ptr<Model> model_;
  const std::shared_ptr<Store> store_;
  const std::string name_;
  const serving::OpenedContext context_;
  const std::unique_ptr<serving::Engine> engine_;
};

absl::StatusOr<std::unique_ptr<Reader>> OpenReader(std::shared_ptr<Model> model,
                                                   std::shared_ptr<Store> store,
                                                   const std::string& context,
                                                   const ReaderOptions& options) {
  if (model == nullptr || store == nullptr) {
    return absl::InvalidArgumentError("a reader needs a model and a store");
  }
  if (context.empty()) return absl::InvalidArgumentError("the name of the context is empty");
  const StoreHandle& handle = StoreHandle::Of(*store);
  ASSIGN_OR_RETURN(DecoderSpec spec, DecoderSpecOf(options, handle.address()));
  ASSIGN_OR_RETURN(
      std::unique_ptr<serving::Engine> engine,
      serving::Engine::Start({.scheduler = {.decoders = std::move(spec), .max_answers = 1}},
                             ModelHandle::Of(*model).loaded(), handle.access()));
  ASSIGN_OR_RETURN(serving::OpenedContext opened,
                   engine->Open(context, options.content_id, /*count=*/1));
  return std::make_unique<ReaderHandle>(std::move(model), std::move(store), context,
                                        std::move(opened), std::move(engine));
}

}  // namespace
}  // namespace library

inline namespace api {

Result<std::unique_ptr<Reader>> Reader::Open(std::shared_ptr<Model> model,
                                             std::shared_ptr<Store> store,
                                             const std::string& context,
                                             const ReaderOptions& options) {
  return library::ToPublic(
      library::OpenReader(std::move(model), std::move(store), context, options));
}

}  // namespace api
}  // namespace carrel
