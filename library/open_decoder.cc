#include "library/open_decoder.h"

#include <utility>

#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "decoder/client/store_client.h"
#include "decoder/select/host_rows.h"
#include "kvstore/service/context_client.h"
#include "library/mapped_rows.h"

namespace carrel::library {
namespace {

// What auto means for this context and zone. Codes are read where the context's folder is.
absl::Status ResolveSelector(DecoderSpec& spec) {
  if (!spec.config.selector.has_value()) return absl::OkStatus();
  decoder::SelectorConfig& method = *spec.config.selector;
  if (!spec.device.zone_on_device) {
    method = decoder::WithOversample(method, spec.device.zone_in_host ? 1 : decoder::kOversample);
  }
  if (method.kind == decoder::SelectorKind::kHash &&
      method.hash.source == decoder::HashSource::kAuto) {
    bool stored = false;
    if (!spec.folder.empty()) {
      ASSIGN_OR_RETURN(stored, HasStoredCodes(spec.folder, spec.context));
    }
    method.hash.source = stored ? decoder::HashSource::kStored : decoder::HashSource::kRandom;
  }
  return absl::OkStatus();
}

}  // namespace

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
  if (spec.derived_weights) RETURN_IF_ERROR(open->AcceptDerived(spec.context));
  RETURN_IF_ERROR(ResolveSelector(spec));
  const decoder::RetrievalConfig& config = spec.config;
  if (config.selector.has_value()) open->method_ = decoder::DescribeSelector(*config.selector);
  // A GPU fetches the rows of its zone from a server if their folder is not here.
  if (decoder::NeedsHostRows(config, spec.device) ||
      (decoder::TakesHostRows(config, spec.device) && !spec.folder.empty())) {
    ASSIGN_OR_RETURN(open->rows_, MapContextRows(spec.folder, spec.context, pool));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<decoder::StoreClient> client, open->store_->NewClient(pool));
  absl::StatusOr<std::unique_ptr<decoder::Decoder>> made = decoder::Decoder::Open(
      open->checkpoint_, std::move(client), spec.context, config, pool, spec.device, open->rows_);
  if (!made.ok()) return open->Confirm(made.status());
  open->decoder_ = *std::move(made);
  return open;
}

absl::Status OpenDecoder::Confirm(const absl::Status& status) const {
  RETURN_IF_ERROR(checkpoint_.CheckUnchanged());
  if (rows_ != nullptr) RETURN_IF_ERROR(rows_->CheckUnchanged());
  return status;
}

}  // namespace carrel::library
