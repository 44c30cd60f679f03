#include "library/document_text.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "common/status.h"

namespace carrel::library {
namespace {

// Shorter ones are abbreviations and numbers of paragraphs: what follows belongs to them.
constexpr int64_t kLeastSentenceBytes = 16;

// Where sentences begin: behind an empty line, and behind what ends one, if white space and no small
// letter follow.
std::vector<int64_t> SentenceBegins(absl::string_view text) {
  std::vector<int64_t> begins = {0};
  const auto add = [&](size_t at) {
    while (at < text.size() && absl::ascii_isspace(text[at])) ++at;
    if (static_cast<int64_t>(at) - begins.back() >= kLeastSentenceBytes) {
      begins.push_back(static_cast<int64_t>(at));
    }
    return at;
  };
  static constexpr absl::string_view kCloses[] = {"\"",           "'",           ")", "]",
                                                  "\xe2\x80\x9d", "\xe2\x80\x99"};
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\n' && i + 1 < text.size() && text[i + 1] == '\n') {
      i = add(i) - 1;
      continue;
    }
    const bool ends = text[i] == '.' || text[i] == '!' || text[i] == '?' ||
                      absl::StartsWith(text.substr(i), "\xe3\x80\x82");
    if (!ends) continue;
    size_t after = i + (text[i] == '\xe3' ? 3 : 1);
    const bool wide = text[i] == '\xe3';
    for (bool more = true; more;) {
      more = false;
      for (const absl::string_view close : kCloses) {
        if (!absl::StartsWith(text.substr(after), close)) continue;
        after += close.size();
        more = true;
      }
    }
    if (!wide && (after >= text.size() || !absl::ascii_isspace(text[after]))) continue;
    size_t next = after;
    while (next < text.size() && absl::ascii_isspace(text[next])) ++next;
    if (next < text.size() && !absl::ascii_islower(text[next])) add(after);
  }
  return begins;
}

}  // namespace

absl::StatusOr<DocumentText> DocumentText::Create(std::vector<TokenId> tokens,
                                                  const model::Tokenizer& tokenizer) {
  DocumentText document;
  document.tokens_ = std::move(tokens);
  document.ends_.reserve(document.tokens_.size());
  model::StreamDecoder stream(&tokenizer);
  for (const TokenId id : document.tokens_) {
    ASSIGN_OR_RETURN(const std::string piece, stream.Push(id));
    document.text_ += piece;
    document.ends_.push_back(static_cast<int64_t>(document.text_.size()));
  }
  ASSIGN_OR_RETURN(const std::string rest, stream.Finish());
  document.text_ += rest;
  if (!document.ends_.empty()) document.ends_.back() = static_cast<int64_t>(document.text_.size());
  document.FindPassages();
  return document;
}

void DocumentText::FindPassages() {
  const auto tokens = static_cast<Position>(tokens_.size());
  const std::vector<int64_t> begins = SentenceBegins(text_);
  Position from = 0;
  const auto close = [&](Position until) {
    const int64_t pieces = (until - from + kPassageTokens - 1) / kPassageTokens;
    for (int64_t i = 0; i < pieces; ++i) {
      passages_.push_back(
          {from + (until - from) * i / pieces, from + (until - from) * (i + 1) / pieces});
    }
    from = until;
  };
  size_t next = 1;
  for (Position token = 0; token < tokens; ++token) {
    // The token that has a sentence's first byte begins it, be it with a space.
    while (next < begins.size() && begins[next] < end(token)) {
      ++next;
      if (token > from) close(token);
    }
  }
  if (tokens > from) close(tokens);
}

int64_t DocumentText::PassageOf(Position token) const {
  const auto after = std::upper_bound(
      passages_.begin(), passages_.end(), token,
      [](Position position, const RowRange& passage) { return position < passage.begin; });
  return after - passages_.begin() - 1;
}

}  // namespace carrel::library
