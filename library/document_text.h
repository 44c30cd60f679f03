// What:   a context's document as text, which bytes of it each token is, and the passages that people
//         read: sentences, those of more than kPassageTokens tokens in pieces; and a text as the tokens of
//         a document.
//         The text is the one that was given: control tokens are not part of it, nor is what a model's chat
//         template puts before it, such as a system message. Offsets are those of the text.
// Errors: FailedPrecondition no tokenizer; InvalidArgument a token that it does not know.
// Cost:   the document in memory: its text, 12 bytes per token.
// Threads: any, once it is made.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::library {

// Where in a document the given text begins.
struct TextBegin {
  Position token = 0;  // the first that has bytes of it
  int64_t bytes = 0;   // of what the tokens spell without control tokens: those before the text
};
// turn_head: what the model's chat template puts before a user's text (ChatTemplate::TurnHead); empty: it
// has none. Before the end of it, from its last control tokens on, there may be another system message. It
// is looked for in the first kHeadTokens tokens of a document that begins with a control token; one that
// has none itself is what the document's letters begin with. Where it is not there, the text begins behind
// the control tokens that the document begins with.
absl::StatusOr<TextBegin> FindTextBegin(absl::Span<const TokenId> document,
                                        const model::Tokenizer& tokenizer,
                                        absl::string_view turn_head);
inline constexpr size_t kHeadTokens = 1024;

// The tokens of a document: the text inside the turn that turn_head begins, or, where that is empty, behind
// the token that documents begin with. Nothing in it is a control token. Errors, and what was dropped, name
// offsets in the text. dropped: as of Tokenizer::Encode.
absl::StatusOr<std::vector<TokenId>> EncodeGivenText(const model::Tokenizer& tokenizer,
                                                     absl::string_view turn_head,
                                                     absl::string_view text,
                                                     model::Tokenizer::Dropped* dropped = nullptr);

class DocumentText {
 public:
  static constexpr int64_t kPassageTokens = 64;

  static absl::StatusOr<DocumentText> Create(std::vector<TokenId> tokens,
                                             const model::Tokenizer& tokenizer,
                                             absl::string_view turn_head);

  const std::string& text() const { return text_; }
  const std::vector<TokenId>& tokens() const { return tokens_; }
  int64_t begin(Position token) const { return token == 0 ? 0 : ends_[token - 1]; }
  int64_t end(Position token) const { return ends_[token]; }
  std::string TextOf(RowRange tokens) const {
    return text_.substr(static_cast<size_t>(begin(tokens.begin)),
                        static_cast<size_t>(end(tokens.end - 1) - begin(tokens.begin)));
  }
  // Token ranges, one behind the other, which cover the document from the text's first token on.
  const std::vector<RowRange>& passages() const { return passages_; }
  int64_t PassageOf(Position token) const;  // its index; -1: the token stands before the text

 private:
  void FindPassages(Position first);

  std::vector<TokenId> tokens_;
  std::string text_;
  std::vector<int64_t> ends_;  // of each token, in text_
  std::vector<RowRange> passages_;
};

}  // namespace carrel::library
