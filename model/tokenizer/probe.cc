#include "model/tokenizer/probe.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace carrel::model {
namespace {

constexpr int64_t kFewestTokens = 48, kMostTokens = 128, kDocumentTokensPerOne = 80;
// Below, less than 1,024 rows lie between sink and local, whatever these are.
constexpr int64_t kShortDocument = 1024;

// What is asked of texts, codes, lists and talks alike.
constexpr ProbeTurn kTurns[] = {
    {"What does the text say about this? Answer in one sentence.", "The text says that"},
    {"Who is named, and which number or code is given?", "It is"},
    {"Summarize the main points.", "1. The"},
    {"Where is it, and when does it happen?", "In the"},
};

}  // namespace

absl::Span<const ProbeTurn> ProbeTurns() { return kTurns; }

int64_t ProbeTokens(int64_t document_tokens) {
  if (document_tokens < kShortDocument) return 0;
  return std::clamp(document_tokens / kDocumentTokensPerOne, kFewestTokens, kMostTokens);
}

absl::StatusOr<std::vector<TokenId>> PlainProbe(const Tokenizer& tokenizer) {
  std::string text;
  for (const ProbeTurn& turn : kTurns) {
    absl::StrAppend(&text, "\n\nQuestion: ", turn.question, "\nAnswer: ", turn.answer);
  }
  return tokenizer.Encode(text);
}

}  // namespace carrel::model
