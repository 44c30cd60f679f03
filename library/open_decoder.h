// What:      a decoder over a context, and all that it needs to live: model, store, rows that are mapped
//            here.
// Errors:    as decoder/decoder.h, derived_weights.h and mapped_rows.h.
// Ownership: keeps model and store.
// Threads:   one.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "decoder/config.h"
#include "decoder/decoder.h"
#include "decoder/plan/way.h"
#include "library/derived_weights.h"
#include "library/document_text.h"
#include "library/loaded_model.h"
#include "library/sources.h"
#include "library/store_access.h"

namespace carrel::v1 {
class Manifest;
}

namespace carrel::library {

struct DecoderSpec {
  std::string context;  // empty: the model alone
  std::string folder;   // of the store, if it is one of this host: for rows that are mapped here
  bool derived_weights = false;  // also weights that were made from the context's
  // What is left open (the method's oversampling, its source of codes) is chosen for this context.
  decoder::RetrievalConfig config;
  decoder::DeviceConfig device;
  // The zone is chosen by cost (decoder/plan/plan.h), or by `way`, where config's is the store's by default.
  bool planned = false;
  std::optional<decoder::Way> way;
  // What the model's chat template puts before a document's text (FindTextBegin), asked when a document is read. Null:
  // nothing.
  std::function<std::string()> turn_head;
};

// Whether a decoder of the model, opened so, is taken by the context of this manifest: by their fingerprints, which is
// what opening compares first.
bool MayOpen(const v1::Manifest& manifest, const model::Checkpoint& checkpoint,
             const decoder::RetrievalConfig& config, bool derived_weights);

class OpenDecoder {
 public:
  // store: null without a context.
  static absl::StatusOr<std::unique_ptr<OpenDecoder>> Create(DecoderSpec spec,
                                                             std::shared_ptr<LoadedModel> model,
                                                             std::shared_ptr<StoreAccess> store);
  const model::Checkpoint& checkpoint() const { return checkpoint_; }
  decoder::Decoder& decoder() { return *decoder_; }
  const decoder::Decoder& decoder() const { return *decoder_; }
  // What becomes of an attempt at answers: `status`, unless the weights, or rows mapped here, changed
  // while it went on. DataLoss then (names the file): no answer of it counts.
  absl::Status Confirm(const absl::Status& status) const;
  // How rows are chosen here (decoder::DescribeSelector); empty where the store searches.
  const std::string& method() const { return method_; }
  // The context's document, read when it is first asked for; FailedPrecondition without a context.
  absl::StatusOr<const DocumentText*> Document();
  // After Generate with `trace`: the passages that its answer, the tokens given, rests on.
  absl::StatusOr<std::vector<Source>> Sources(absl::Span<const TokenId> answer, int64_t most);
  // With derived_weights, where the weights are not the context's own.
  const std::optional<DerivedWeights>& derived() const { return derived_; }

 private:
  OpenDecoder(std::shared_ptr<LoadedModel> model, std::shared_ptr<StoreAccess> store);
  absl::Status AcceptDerived(const std::string& context);

  const std::shared_ptr<LoadedModel> model_;
  const std::shared_ptr<StoreAccess> store_;
  model::Checkpoint checkpoint_;  // the model's, but for a fingerprint that may be the context's
  std::shared_ptr<const decoder::HostRows> rows_;  // null: none are mapped here
  std::unique_ptr<decoder::Decoder> decoder_;
  std::string context_, method_;
  std::function<std::string()> turn_head_;
  std::optional<DocumentText> document_;
  std::optional<DerivedWeights> derived_;
};

}  // namespace carrel::library
