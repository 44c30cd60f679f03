#include "carrel/reader.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "decoder/fidelity.h"
#include "library/handles.h"
#include "library/open_decoder.h"
#include "library/status.h"

namespace carrel {
namespace library {
namespace {

decoder::Fidelity Named(Fidelity fidelity) {
  switch (fidelity) {
    case Fidelity::kFast:
      return decoder::Fidelity::kFast;
    case Fidelity::kBalanced:
      return decoder::Fidelity::kBalanced;
    case Fidelity::kFaithful:
      return decoder::Fidelity::kFaithful;
  }
  return decoder::Fidelity::kBalanced;
}

absl::Status SetSelection(const ReaderOptions& options, decoder::RetrievalConfig& config) {
  if (options.top_k.has_value()) {
    if (options.target_error.has_value()) {
      return absl::InvalidArgumentError("top_k and target_error: give one");
    }
    if (*options.top_k != kAllRows && *options.top_k < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("top_k=", *options.top_k, " is neither kAllRows nor at least 1"));
    }
    config.selection = select::TopK{*options.top_k};
    if (*options.top_k == kAllRows) config.selection = select::All();
    return absl::OkStatus();
  }
  config.dense_layers = 0;
  decoder::FidelityOptions fidelity{
      options.target_error.value_or(decoder::TargetError(Named(options.fidelity)))};
  if (!options.target_error.has_value()) fidelity.or_top_k = decoder::kUsualTopK;
  config.selection = fidelity;
  return absl::OkStatus();
}

absl::Status SetZone(const ReaderOptions& options, const StoreAddress& store, DecoderSpec& spec) {
  const bool cuda = options.device == Device::kCuda;
  spec.device.device = cuda ? model::Device::kCuda : model::Device::kCpu;
  if (options.gpu_memory > 0) spec.device.gpu_memory = options.gpu_memory;
  if (options.zone == Zone::kStore) return absl::OkStatus();
  if (options.zone == Zone::kAuto) {
    spec.planned = true;
    return absl::OkStatus();
  }
  if (options.zone == Zone::kDevice && !cuda) {
    return absl::InvalidArgumentError("zone=kDevice needs device=kCuda");
  }
  if (options.zone == Zone::kHost && !cuda && store.folder.empty()) {
    return absl::InvalidArgumentError(
        "zone=kHost maps the rows of a folder of this host: open the store by its folder");
  }
  if (options.zone == Zone::kHost) {
    spec.config.zone = decoder::HostZoneOptions{decoder::UsualSelector(/*keys_cross_bus=*/cuda)};
  } else {
    spec.config.zone = decoder::DeviceZoneOptions{decoder::UsualSelector(false)};
  }
  return absl::OkStatus();
}

class ReaderHandle final : public Reader {
 public:
  ReaderHandle(std::shared_ptr<Model> model, std::shared_ptr<Store> store,
               std::unique_ptr<OpenDecoder> open)
      : model_(std::move(model)), store_(std::move(store)), open_(std::move(open)) {}

  Result<Answer> Generate(std::string_view prompt, const GenerateOptions& options) override {
    absl::StatusOr<model::Seam> seam = open_->EncodePrompt({prompt.data(), prompt.size()});
    if (!seam.ok()) return ToPublic(seam.status());
    return ToPublic(Answered(*std::move(seam), options));
  }

  Result<Answer> GenerateFrom(std::span<const Token> prompt,
                              const GenerateOptions& options) override {
    return ToPublic(Answered({.tokens = {prompt.begin(), prompt.end()}}, options));
  }

  ReaderStatistics statistics() const override {
    const decoder::Statistics inside = open_->decoder().statistics();
    ReaderStatistics outside;
    outside.context_tokens = open_->decoder().context_tokens();
    double rows = 0;
    for (const decoder::LayerStatistics& layer : inside.layers)
      rows += decoder::RowsPerToken(layer);
    const model::ModelConfig& model = open_->checkpoint().config;
    outside.rows_attended = rows / static_cast<double>(model.shape.kv_heads * model.shape.layers);
    outside.promised_error = inside.promised_error;
    outside.bytes_received = inside.bytes_received;
    return outside;
  }

 private:
  absl::StatusOr<Answer> Answered(model::Seam prompt, const GenerateOptions& options) {
    const model::Tokenizer* tokenizer = open_->checkpoint().tokenizer.get();
    std::optional<model::StreamDecoder> stream;
    if (tokenizer != nullptr) stream.emplace(tokenizer);
    Answer answer;
    const auto show = [&](const std::string& piece) -> absl::Status {
      answer.text += piece;
      if (piece.empty() || !options.on_text || options.on_text(piece)) return absl::OkStatus();
      return absl::CancelledError("on_text ended the answer");
    };
    decoder::GenerateOptions inside;
    inside.max_tokens = options.max_tokens;
    inside.give_up = prompt.give_up;
    inside.sampling = {
        .temperature = options.temperature, .top_p = options.top_p, .seed = options.seed};
    inside.on_token = [&](TokenId id) -> absl::Status {
      if (!stream.has_value()) return absl::OkStatus();
      ASSIGN_OR_RETURN(const std::string piece, stream->Push(id));
      return show(piece);
    };
    absl::StatusOr<decoder::GenerateResult> result =
        open_->decoder().Generate(prompt.tokens, inside);
    RETURN_IF_ERROR(open_->Confirm(result.status()));
    if (stream.has_value()) {
      ASSIGN_OR_RETURN(const std::string rest, stream->Finish());
      RETURN_IF_ERROR(show(rest));
    }
    answer.tokens = std::move(result->ids);
    answer.stop = static_cast<StopReason>(result->stop);
    answer.prompt_seconds = result->prompt_seconds;
    answer.generate_seconds = result->generate_seconds;
    return answer;
  }

  const std::shared_ptr<Model> model_;
  const std::shared_ptr<Store> store_;
  const std::unique_ptr<OpenDecoder> open_;
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
  DecoderSpec spec;
  spec.context = context;
  spec.folder = handle.address().folder;
  spec.derived_weights = options.derived_weights;
  spec.config.content_id = options.content_id;
  RETURN_IF_ERROR(SetSelection(options, spec.config));
  RETURN_IF_ERROR(SetZone(options, handle.address(), spec));
  ASSIGN_OR_RETURN(
      std::unique_ptr<OpenDecoder> open,
      OpenDecoder::Create(std::move(spec), ModelHandle::Of(*model).loaded(), handle.access()));
  return std::make_unique<ReaderHandle>(std::move(model), std::move(store), std::move(open));
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
