// What:   what becomes of a text before it is taken apart, as tokenizer.json's normalizer says.
// Source: Hugging Face tokenizers: NFC; Prepend of U+2581 (before a text that is not empty); Replace of
//         spaces by it.
// Errors: as NormalizeNfc.
// Threads: reentrant.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace carrel::model {

enum class NormalizerStep { kNfc, kPrependSpace, kReplaceSpaces };

absl::StatusOr<std::string> Normalize(absl::Span<const NormalizerStep> steps,
                                      absl::string_view text);

}  // namespace carrel::model
