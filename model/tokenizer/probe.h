// What:   the probe: tokens that stand for what comes behind a document, a chat's end of the user's
//         turn, questions that can be asked of any text, and how answers begin. Prefill takes them
//         through the model behind the document and measures on their queries what rows leave
//         (kvstore/index/summaries/fidelity.h): a question's queries are unlike those of a document's
//         own tokens, whose errors were promised and exceeded up to three times (decision 092).
// Math:   a probe of n tokens costs about n / tokens of prefill; ProbeTokens is at most 1/80 of the
//         document from 3,840 tokens on.
// Edge:   a document whose zone is attended whole under every fidelity needs none.
// Errors: those of the tokenizer.
// Threads: any.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::model {

// What a user asks, and how it is answered: some words, for nobody knows the text.
struct ProbeTurn {
  const char* question;
  const char* answer;
};

// The same for every document and model, so that what is measured can be compared.
absl::Span<const ProbeTurn> ProbeTurns();

// Of a probe behind a document of so many tokens; 0: it needs none.
int64_t ProbeTokens(int64_t document_tokens);

// The turns where no chat template says how they are written: "\n\nQuestion: ...\nAnswer: ...".
absl::StatusOr<std::vector<TokenId>> PlainProbe(const Tokenizer& tokenizer);

}  // namespace carrel::model
