// What:   a context's document as text, which bytes of it each token is, and the passages that people
//         read: sentences, those of more than kPassageTokens tokens in pieces.
//         Control tokens, and what begins a document, are not part of the text.
// Errors: FailedPrecondition no tokenizer; InvalidArgument a token that it does not know.
// Cost:   the document in memory: its text, 12 bytes per token.
// Threads: any, once it is made.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::library {

class DocumentText {
 public:
  static constexpr int64_t kPassageTokens = 64;

  static absl::StatusOr<DocumentText> Create(std::vector<TokenId> tokens,
                                             const model::Tokenizer& tokenizer);

  const std::string& text() const { return text_; }
  const std::vector<TokenId>& tokens() const { return tokens_; }
  int64_t begin(Position token) const { return token == 0 ? 0 : ends_[token - 1]; }
  int64_t end(Position token) const { return ends_[token]; }
  std::string TextOf(RowRange tokens) const {
    return text_.substr(static_cast<size_t>(begin(tokens.begin)),
                        static_cast<size_t>(end(tokens.end - 1) - begin(tokens.begin)));
  }
  // Token ranges, one behind the other, which cover the document.
  const std::vector<RowRange>& passages() const { return passages_; }
  int64_t PassageOf(Position token) const;  // its index

 private:
  void FindPassages();

  std::vector<TokenId> tokens_;
  std::string text_;
  std::vector<int64_t> ends_;  // of each token, in text_
  std::vector<RowRange> passages_;
};

}  // namespace carrel::library
