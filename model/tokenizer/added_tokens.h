// What:   finds the tokens that are matched in the text as written, before any pre-tokenization.
// Source: Hugging Face tokenizers, AddedVocabulary: leftmost-longest; lstrip and rstrip take the
//         white space beside a match into it; a single_word match must not touch a word character.
// Edge:   a token with empty content is never matched.
// Threads: immutable, reentrant.     Cost: O(text), plus the length of the near matches.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "model/tokenizer/plain_range.h"

namespace carrel::model {

struct AddedToken {
  std::string content;
  TokenId id = -1;
  bool special = false;      // left out of decoded text on request
  bool single_word = false;  // only between non-word characters
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space behind it
  bool normalized = false;   // content and text are compared after normalization

  bool operator==(const AddedToken&) const = default;
};

// Joins the tokens that another file (`path`, for messages) adds: a new one is appended, one that
// is there already takes the new flags. For each of them a line "id flags content" is appended to
// *changes. InvalidArgument: one id with two contents, or one content with two ids.
absl::Status MergeAddedTokens(const std::string& path, const std::vector<AddedToken>& more,
                              std::vector<AddedToken>* tokens, std::string* changes);

struct TextSpan {
  TokenId id = -1;  // -1: plain text
  absl::string_view text;
};

class AddedTokenMatcher {
 public:
  explicit AddedTokenMatcher(std::vector<AddedToken> tokens);

  bool empty() const { return tokens_.empty(); }
  // Those with ids from `end` on are matched no more.
  void DropFrom(int64_t end);

  // Appends the spans of `text` in order; plain ones are not empty. The text must be valid UTF-8.
  // plain: in order, disjoint: what would touch one of these ranges is not matched.
  void Split(absl::string_view text, std::vector<TextSpan>* spans,
             absl::Span<const PlainRange> plain = {}) const;

 private:
  struct Node {
    int32_t token = -1;  // index in tokens_ of the token that ends here
    absl::flat_hash_map<char, int32_t> next;
  };

  // The longest token that `text` begins with, or -1.
  int32_t LongestPrefix(absl::string_view text) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;  // a trie; nodes_[0] is the root
  std::array<bool, 256> begins_{};
};

}  // namespace carrel::model
