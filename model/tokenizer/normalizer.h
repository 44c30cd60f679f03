// What:   what becomes of a text before it is taken apart, as tokenizer.json's normalizer says.
// Source: Hugging Face tokenizers: NFC; Prepend (of a text that is not empty); Replace of a string.
// Errors: as NormalizeNfc.
// Threads: reentrant.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace carrel::model {

struct NormalizerStep {
  enum class Kind { kNfc, kPrepend, kReplace };
  Kind kind = Kind::kNfc;
  std::string from;  // kReplace; not empty
  std::string to;    // what is prepended, or put in its place
};

absl::StatusOr<std::string> Normalize(absl::Span<const NormalizerStep> steps,
                                      absl::string_view text);

}  // namespace carrel::model
