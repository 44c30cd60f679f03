#include "library/api/answering.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "decoder/fidelity.h"

namespace carrel::library {
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

}  // namespace

absl::StatusOr<DecoderSpec> DecoderSpecOf(const ReaderOptions& options, const StoreAddress& store) {
  DecoderSpec spec;
  spec.folder = store.folder;
  spec.derived_weights = options.derived_weights;
  RETURN_IF_ERROR(SetSelection(options, spec.config));
  RETURN_IF_ERROR(SetZone(options, store, spec));
  return spec;
}

serving::AnswerJob JobOf(model::Seam prompt, const GenerateOptions& options,
                         const model::Checkpoint& checkpoint) {
  serving::AnswerJob job;
  job.prompt = std::move(prompt.tokens);
  job.give_up = prompt.give_up;
  job.max_tokens = options.max_tokens;
  job.sampling = {.temperature = options.temperature, .top_p = options.top_p, .seed = options.seed};
  if (options.on_text && checkpoint.tokenizer != nullptr) {
    job.on_text = [&options](const std::string& piece) {
      return piece.empty() || options.on_text(piece);
    };
  }
  return job;
}

absl::StatusOr<Reply> ReplyOf(absl::StatusOr<serving::AnswerJob::Done> done,
                              const model::Checkpoint& checkpoint) {
  RETURN_IF_ERROR(done.status());
  if (done->left) return absl::CancelledError("on_text ended the answer");
  Reply reply;
  if (checkpoint.tokenizer != nullptr) reply.text = std::move(done->text);
  reply.tokens = std::move(done->result.ids);
  reply.stop = static_cast<StopReason>(done->result.stop);
  reply.prompt_seconds = done->result.prompt_seconds;
  reply.generate_seconds = done->result.generate_seconds;
  reply.context_tokens = done->context_tokens;
  reply.known_tokens = done->resumed_tokens;
  for (serving::AnswerSource& source : done->sources) {
    reply.sources.push_back({std::move(source.text), source.share, source.begin, source.end,
                             source.first_token, source.end_token});
  }
  return reply;
}

}  // namespace carrel::library
