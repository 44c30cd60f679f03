#include "library/derived_weights.h"

#include <map>

#include "absl/strings/str_format.h"
#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "prefill/manifest_probe.h"

namespace carrel::library {
namespace {

constexpr char kWeights[] = "weights_sha256";
constexpr char kTokenizer[] = "tokenizer_sha256";
// How keys are stored is what retrieval presents, not what the model is.
constexpr char kKeyPosition[] = "key_position";

}  // namespace

absl::StatusOr<std::optional<DerivedWeights>> AcceptDerivedWeights(const v1::Manifest& manifest,
                                                                   model::Checkpoint& checkpoint) {
  std::map<std::string, std::string> context;
  for (const auto& field : manifest.fingerprint().fields()) context[field.name()] = field.value();
  std::map<std::string, std::string> model(checkpoint.fingerprint.begin(),
                                           checkpoint.fingerprint.end());
  const bool same_tokenizer = context[kTokenizer] == model[kTokenizer];
  if (context[kWeights] == model[kWeights] && same_tokenizer) return std::nullopt;
  for (const char* field : {kWeights, kTokenizer, kKeyPosition}) model[field] = context[field];
  if (model != context) return std::nullopt;

  ASSIGN_OR_RETURN(const model::WeightsProbe probe,
                   prefill::ProbeFromProto(manifest.weights_probe()));
  DerivedWeights derived;
  derived.of_sha256 = context[kWeights];
  ASSIGN_OR_RETURN(derived.seen, model::CheckDerivedWeights(probe, *checkpoint.weights));
  if (!same_tokenizer) {
    if (probe.tokens.empty() || checkpoint.tokenizer == nullptr) {
      return absl::FailedPreconditionError(
          "weights=derived: the tokenizers differ, and one of context and model has none");
    }
    RETURN_IF_ERROR(model::CheckSameTokens(probe, *checkpoint.tokenizer));
  }
  for (auto& [name, value] : checkpoint.fingerprint) {
    if (name == kWeights || name == kTokenizer) value = context[name];
  }
  return derived;
}

std::string DescribeDerived(const DerivedWeights& derived) {
  const model::Derivation& seen = derived.seen;
  std::string text = absl::StrFormat("weights: made from those of the context (%s): ",
                                     derived.of_sha256.substr(0, 12));
  if (seen.quantised == 0) {
    absl::StrAppendFormat(&text, "%d sampled values of %d matrices are the same, rounded at most",
                          seen.values, seen.matrices);
    return text;
  }
  absl::StrAppendFormat(
      &text, "of %d sampled values %.2f%% are not the nearest that their type has (at most %.2f%%)",
      seen.quantised, 100 * seen.beyond, 100 * seen.beyond_allowed);
  return text;
}

}  // namespace carrel::library
