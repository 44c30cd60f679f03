// What:   --weights derived: a context of one checkpoint, asked with weights made from it
//         (docs/decisions/044-derived-weights.md).
// Errors: FailedPrecondition weights, or tokens, that were not shown to be derived, and a context
//         without sampled weights; DataLoss samples that do not hold together.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "model/checkpoint.h"
#include "model/weights_probe.h"

namespace carrel::v1 {
class Manifest;
}

namespace carrel::library {

struct DerivedWeights {
  std::string of_sha256;  // the weights that computed the context
  model::Derivation seen;
};

// Where the checkpoint's weights or tokenizer differ from those of the context, and nothing else
// does: shows that they were made from them, and gives the checkpoint's fingerprint the digests of
// the context's. Nothing if they are the context's own; nor if more differs: the store names it.
absl::StatusOr<std::optional<DerivedWeights>> AcceptDerivedWeights(const v1::Manifest& manifest,
                                                                   model::Checkpoint& checkpoint);

// One line for people.
std::string DescribeDerived(const DerivedWeights& derived);

}  // namespace carrel::library
