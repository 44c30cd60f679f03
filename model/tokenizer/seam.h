// What:   the seam between a document, whose tokens are fixed, and the text that goes on with it: the
//         tokens of the whole text begin with most of the document's, and JoinTokens says which of its
//         last ones are given up, and what follows.
// Math:   let D be the document's tokens, P the prompt's text, E the tokens of D's text and P. For a
//         place s in D where the tokenizer begins a word, tokens behind s are those of the text behind s,
//         so E = D[0, s) + Encode(text(D[s, n)) + P). Where words begin cannot be seen from outside:
//         every s of a stretch of D is tried that gives D[s, n) again without P. One of them is such a
//         place if a word begins there at all; if all give the same E, it is the whole text's.
// Edge:   control tokens are never given up, and what stands before one is not looked at; none is made
//         of characters on both sides of the seam. Where places disagree (a word of some hundred
//         tokens), tokens do not decode to text, or more would have to be given up than may be, the
//         prompt stands by itself: whole is false.
// Errors: those of Tokenizer::Encode of the prompt alone.
// Threads: any.     Cost: that of the prompt twice, and of some 100 short texts.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::model {

// The last tokens of a document, that many or all it has.
inline constexpr size_t kSeamTail = 256;

struct Seam {
  int64_t give_up = 0;          // of the document's last tokens
  std::vector<TokenId> tokens;  // what comes in their place, and then the prompt's
  bool whole = true;            // document and these are the tokens of the whole text
};

// tail: the last kSeamTail tokens of the document, or all of it; none: nothing is known of it.
// plain, dropped: of the prompt, as Tokenizer::Encode.
absl::StatusOr<Seam> JoinTokens(const Tokenizer& tokenizer, absl::Span<const TokenId> tail,
                                int64_t most_given_up, absl::string_view prompt,
                                Tokenizer::Dropped* dropped = nullptr,
                                absl::Span<const PlainRange> plain = {});

// Whether the token is left out of text: what it says stands for something else.
bool IsControl(const Tokenizer& tokenizer, TokenId id);

}  // namespace carrel::model
