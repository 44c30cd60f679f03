#include "serving/chat_probe.h"

#include <algorithm>

#include "library/document_ends.h"
#include "model/tokenizer/probe.h"
#include "model/tokenizer/seam.h"
#include "serving/chat_template.h"

namespace carrel::serving {
namespace {

library::DocumentEnds EndsOf(absl::Span<const TokenId> document) {
  const size_t first = std::min(document.size(), library::DocumentEnds::kFirst);
  const size_t last = std::min(document.size(), model::kSeamTail);
  library::DocumentEnds ends;
  ends.known = true;
  ends.tokens = static_cast<int64_t>(document.size());
  ends.first.assign(document.begin(), document.begin() + static_cast<std::ptrdiff_t>(first));
  ends.last.assign(document.end() - static_cast<std::ptrdiff_t>(last), document.end());
  return ends;
}

}  // namespace

std::vector<TokenId> ChatProbe(ChatTemplate* chat, const model::Tokenizer& tokenizer,
                               absl::Span<const TokenId> document) {
  absl::Span<const model::ProbeTurn> turns = model::ProbeTurns();
  if (chat == nullptr) turns = {};
  const library::DocumentEnds ends = EndsOf(document);
  for (; !turns.empty(); turns = turns.first(turns.size() > 1 ? 1 : 0)) {
    std::vector<Message> messages;
    for (const model::ProbeTurn& turn : turns) {
      messages.push_back({"user", turn.question});
      messages.push_back({"assistant", turn.answer});
    }
    // The answer to the last question is only begun.
    messages.pop_back();
    absl::StatusOr<model::Seam> probe =
        chat->EncodeBehind(messages, tokenizer, ends, /*most_given_up=*/0);
    if (probe.ok() && !probe->tokens.empty()) return std::move(probe->tokens);
  }
  return model::PlainProbe(tokenizer).value_or(std::vector<TokenId>());
}

}  // namespace carrel::serving
