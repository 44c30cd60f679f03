#include "model/tokenizer/normalizer.h"

#include "absl/strings/str_replace.h"
#include "common/status.h"
#include "model/tokenizer/byte_alphabet.h"
#include "model/tokenizer/unicode.h"

namespace carrel::model {

absl::StatusOr<std::string> Normalize(absl::Span<const NormalizerStep> steps,
                                      absl::string_view text) {
  std::string result(text);
  for (const NormalizerStep step : steps) {
    switch (step) {
      case NormalizerStep::kNfc: {
        ASSIGN_OR_RETURN(result, NormalizeNfc(result));
        break;
      }
      case NormalizerStep::kPrependSpace:
        if (!result.empty()) result.insert(0, kSpaceSymbol);
        break;
      case NormalizerStep::kReplaceSpaces:
        result = absl::StrReplaceAll(result, {{" ", kSpaceSymbol}});
        break;
    }
  }
  return result;
}

}  // namespace carrel::model
