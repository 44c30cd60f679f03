#include "library/open_decoder.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/machine_memory.h"
#include "common/status.h"
#include "decoder/plan/plan.h"
#include "decoder/select/host_rows.h"
#include "kvstore/service/context_client.h"
#include "library/machine_rates.h"
#include "library/mapped_rows.h"
#include "retrieval/session.h"

namespace carrel::library {
namespace {

// What auto means for this context and zone. Codes are read where the context's folder is.
absl::Status ResolveSelector(const DecoderSpec& spec, bool host, decoder::SelectorConfig& method) {
  if (host && spec.device.device == model::Device::kCpu)
    method = decoder::WithOversample(method, decoder::kOversample);
  if (method.kind != decoder::SelectorKind::kHash ||
      method.hash.source != decoder::HashSource::kAuto)
    return absl::OkStatus();
  bool stored = false;
  if (!spec.folder.empty()) {
    ASSIGN_OR_RETURN(stored, HasStoredCodes(spec.folder, spec.context));
  }
  method.hash.source = stored ? decoder::HashSource::kStored : decoder::HashSource::kRandom;
  return absl::OkStatus();
}

absl::Status ResolveZone(const DecoderSpec& spec, decoder::ZoneOptions& zone) {
  if (auto* host = std::get_if<decoder::HostZoneOptions>(&zone))
    return ResolveSelector(spec, /*host=*/true, host->selector);
  if (auto* device = std::get_if<decoder::DeviceZoneOptions>(&zone))
    return ResolveSelector(spec, /*host=*/false, device->selector);
  return absl::OkStatus();
}

// What a plan may choose among on this machine, for this context.
absl::StatusOr<decoder::PlanOptions> PlanOptionsOf(const DecoderSpec& spec,
                                                   const model::ModelConfig& model,
                                                   ThreadPool* pool) {
  const bool cuda = spec.device.device == model::Device::kCuda;
  decoder::PlanOptions options;
  options.way = spec.way;
  ASSIGN_OR_RETURN(options.rates, MachineRates(spec.device.device, model.shape, pool));
  options.host.selector = decoder::UsualSelector(/*keys_cross_bus=*/cuda);
  options.device.selector = decoder::UsualSelector(false);
  RETURN_IF_ERROR(ResolveSelector(spec, true, options.host.selector));
  RETURN_IF_ERROR(ResolveSelector(spec, false, options.device.selector));
  std::string& host = options.unfit[static_cast<size_t>(decoder::Place::kHost)];
  std::string& device = options.unfit[static_cast<size_t>(decoder::Place::kDevice)];
  if (spec.folder.empty()) {
    host = "the rows lie at a server";
  } else if (!cuda && !spec.way.has_value()) {
    host = "the store in this process answers from the same rows, by the context's index";
  }
  if (!cuda) {
    device = "the model runs on the CPU";
    return options;
  }
  ASSIGN_OR_RETURN(options.device_bytes, decoder::GpuMemory());
  options.host_bytes = MachineMemoryBytes() / 2;
  return options;
}

}  // namespace

bool MayOpen(const v1::Manifest& manifest, const model::Checkpoint& checkpoint,
             const decoder::RetrievalConfig& config, bool derived_weights) {
  std::map<std::string, std::string> context;
  for (const auto& field : manifest.fingerprint().fields()) context[field.name()] = field.value();
  const auto taken = [&](const model::Checkpoint& presented) {
    const auto fields = decoder::PresentedFingerprint(presented, config);
    return context == std::map<std::string, std::string>(fields.begin(), fields.end());
  };
  if (!derived_weights) return taken(checkpoint);
  model::Checkpoint derived = checkpoint;
  return AcceptDerivedWeights(manifest, derived).ok() && taken(derived);
}

OpenDecoder::OpenDecoder(std::shared_ptr<LoadedModel> model, std::shared_ptr<StoreAccess> store)
    : model_(std::move(model)), store_(std::move(store)), checkpoint_(model_->checkpoint()) {}

absl::Status OpenDecoder::AcceptDerived(const std::string& context) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextClient> client,
                   store_->NewContextClient());
  ASSIGN_OR_RETURN(const v1::Manifest manifest, client->Get(context));
  ASSIGN_OR_RETURN(derived_, AcceptDerivedWeights(manifest, checkpoint_));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<OpenDecoder>> OpenDecoder::Create(
    DecoderSpec spec, std::shared_ptr<LoadedModel> model, std::shared_ptr<StoreAccess> store) {
  std::unique_ptr<OpenDecoder> open(new OpenDecoder(std::move(model), std::move(store)));
  ThreadPool* const pool = open->model_->pool();
  if (spec.context.empty()) {
    ASSIGN_OR_RETURN(open->decoder_,
                     decoder::Decoder::OpenModelOnly(open->checkpoint_, pool, spec.device));
    return open;
  }
  open->context_ = spec.context;
  open->turn_head_ = spec.turn_head;
  if (spec.derived_weights) RETURN_IF_ERROR(open->AcceptDerived(spec.context));
  RETURN_IF_ERROR(ResolveZone(spec, spec.config.zone));
  if (spec.planned) {
    ASSIGN_OR_RETURN(decoder::PlanOptions plan,
                     PlanOptionsOf(spec, open->checkpoint_.config, pool));
    if (!spec.folder.empty()) {
      plan.map_rows = [&]() -> absl::StatusOr<std::shared_ptr<const decoder::HostRows>> {
        if (open->rows_ == nullptr) {
          ASSIGN_OR_RETURN(open->rows_, MapContextRows(spec.folder, spec.context, pool));
        }
        return open->rows_;
      };
    }
    spec.config.plan = std::make_shared<const decoder::PlanOptions>(std::move(plan));
  }
  const decoder::RetrievalConfig& config = spec.config;
  if (const auto* selector = decoder::SelectorOf(config); selector != nullptr)
    open->method_ = decoder::DescribeSelector(*selector);
  // A GPU fetches the rows of its zone from a server if their folder is not here.
  if (spec.planned) {
    // The plan says whether they are wanted.
  } else if (decoder::NeedsHostRows(config, spec.device) ||
             (decoder::TakesHostRows(config, spec.device) && !spec.folder.empty())) {
    ASSIGN_OR_RETURN(open->rows_, MapContextRows(spec.folder, spec.context, pool));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<retrieval::Session> client, open->store_->NewClient(pool));
  absl::StatusOr<std::unique_ptr<decoder::Decoder>> made = decoder::Decoder::Open(
      open->checkpoint_, std::move(client), spec.context, config, pool, spec.device, open->rows_);
  if (!made.ok()) return open->Confirm(made.status());
  open->decoder_ = *std::move(made);
  if (const std::optional<decoder::Plan>& plan = open->decoder_->plan(); plan.has_value()) {
    const decoder::Way way = plan->taken().way;
    if (way.place != decoder::Place::kStore && !way.dense) {
      open->method_ = decoder::DescribeSelector(way.place == decoder::Place::kHost
                                                    ? config.plan->host.selector
                                                    : config.plan->device.selector);
    }
  }
  return open;
}

absl::StatusOr<const DocumentText*> OpenDecoder::Document() {
  if (document_.has_value()) return &*document_;
  if (checkpoint_.tokenizer == nullptr) {
    return absl::FailedPreconditionError("sources: the model came without a tokenizer");
  }
  if (context_.empty()) return absl::FailedPreconditionError("sources: there is no context");
  absl::StatusOr<std::vector<TokenId>> tokens =
      store_->DocumentTokens(context_, decoder_->content_id());
  if (!tokens.ok()) return Annotate(tokens.status(), "sources");
  if (static_cast<int64_t>(tokens->size()) != decoder_->context_tokens()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "sources: context \"", context_, "\" has ", tokens->size(), " tokens now, not the ",
        decoder_->context_tokens(), " that were opened: open it anew"));
  }
  ASSIGN_OR_RETURN(document_, DocumentText::Create(*std::move(tokens), *checkpoint_.tokenizer,
                                                   turn_head_ == nullptr ? "" : turn_head_()));
  return &*document_;
}

absl::StatusOr<std::vector<Source>> OpenDecoder::Sources(absl::Span<const TokenId> answer,
                                                         int64_t most) {
  ASSIGN_OR_RETURN(const DocumentText* const document, Document());
  ASSIGN_OR_RETURN(const std::vector<decoder::AttendedRow> rows, decoder_->AttendedRows());
  return FindSources(*document, rows, answer, most);
}

absl::Status OpenDecoder::Confirm(const absl::Status& status) const {
  RETURN_IF_ERROR(checkpoint_.CheckUnchanged());
  if (rows_ != nullptr) RETURN_IF_ERROR(rows_->CheckUnchanged());
  return status;
}

}  // namespace carrel::library
