#include "model/tokenizer/normalizer.h"

#include <utility>

#include "absl/strings/str_replace.h"
#include "common/status.h"
#include "model/tokenizer/unicode.h"

namespace carrel::model {

absl::StatusOr<std::string> Normalize(absl::Span<const NormalizerStep> steps,
                                      absl::string_view text) {
  std::string result(text);
  for (const NormalizerStep& step : steps) {
    switch (step.kind) {
      case NormalizerStep::Kind::kNfc: {
        ASSIGN_OR_RETURN(result, NormalizeNfc(result));
        break;
      }
      case NormalizerStep::Kind::kPrepend:
        if (!result.empty()) result.insert(0, step.to);
        break;
      case NormalizerStep::Kind::kReplace:
        result = absl::StrReplaceAll(result, {{step.from, step.to}});
        break;
    }
  }
  return result;
}

}  // namespace carrel::model
