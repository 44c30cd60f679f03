#include "library/document_text.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "model/tokenizer/seam.h"

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

// What tokens spell, and where in it each ends.
struct Spelled {
  std::string shown, text;  // with control tokens, and without
  std::vector<int64_t> shown_ends, text_ends;
  std::vector<bool> control;
};

absl::StatusOr<Spelled> Spell(absl::Span<const TokenId> ids, const model::Tokenizer& tokenizer) {
  Spelled spelled;
  model::StreamDecoder shown(&tokenizer, /*skip_special=*/false), text(&tokenizer);
  for (const TokenId id : ids) {
    ASSIGN_OR_RETURN(const std::string more_shown, shown.Push(id));
    ASSIGN_OR_RETURN(const std::string more_text, text.Push(id));
    spelled.shown += more_shown;
    spelled.text += more_text;
    spelled.control.push_back(model::IsControl(tokenizer, id));
    spelled.shown_ends.push_back(static_cast<int64_t>(spelled.shown.size()));
    spelled.text_ends.push_back(static_cast<int64_t>(spelled.text.size()));
  }
  return spelled;
}

// The shortest end of a turn's head that begins with a control token and that the head has once: the
// user's role. Empty: there is none.
absl::StatusOr<absl::string_view> RoleOf(absl::string_view head,
                                         const model::Tokenizer& tokenizer) {
  ASSIGN_OR_RETURN(const std::vector<TokenId> ids, tokenizer.Encode(head));
  ASSIGN_OR_RETURN(const Spelled spelled, Spell(ids, tokenizer));
  if (spelled.shown != head) return "";  // a tokenizer that does not give back texts
  for (size_t i = ids.size(); i-- > 0;) {
    if (!spelled.control[i]) continue;
    const absl::string_view role =
        head.substr(i == 0 ? 0 : static_cast<size_t>(spelled.shown_ends[i - 1]));
    if (head.find(role) + role.size() == head.size()) return role;
  }
  return "";
}

}  // namespace

absl::StatusOr<TextBegin> FindTextBegin(absl::Span<const TokenId> document,
                                        const model::Tokenizer& tokenizer,
                                        absl::string_view turn_head) {
  document = document.subspan(0, kHeadTokens);
  TextBegin begin;  // behind the control tokens that it begins with
  for (const TokenId id : document) {
    if (!model::IsControl(tokenizer, id)) break;
    ++begin.token;
  }
  if (turn_head.empty()) return begin;
  ASSIGN_OR_RETURN(const absl::string_view role, RoleOf(turn_head, tokenizer));
  ASSIGN_OR_RETURN(const Spelled spelled, Spell(document, tokenizer));
  const auto tokens = static_cast<Position>(document.size());
  if (role.empty() && absl::StartsWith(spelled.text, turn_head)) {  // of letters alone
    const auto end = static_cast<int64_t>(turn_head.size());
    while (begin.token < tokens && spelled.text_ends[begin.token] <= end) ++begin.token;
    begin.bytes = end;
    return begin;
  }
  for (Position i = 0; begin.token > 0 && i < tokens && !role.empty(); ++i) {
    const int64_t from = i == 0 ? 0 : spelled.shown_ends[i - 1];
    const absl::string_view rest =
        absl::string_view(spelled.shown).substr(static_cast<size_t>(from));
    if (!spelled.control[i] || !absl::StartsWith(rest, role)) continue;
    const int64_t end = from + static_cast<int64_t>(role.size());
    Position last = i;  // of the head
    while (spelled.shown_ends[last] < end) ++last;
    const int64_t shared = spelled.shown_ends[last] - end;  // bytes of that token that are text
    return TextBegin{.token = shared > 0 ? last : last + 1,
                     .bytes = spelled.text_ends[last] - shared};
  }
  return begin;
}

absl::StatusOr<std::vector<TokenId>> EncodeGivenText(const model::Tokenizer& tokenizer,
                                                     absl::string_view turn_head,
                                                     absl::string_view text,
                                                     model::Tokenizer::Dropped* dropped) {
  const auto begin = static_cast<int64_t>(turn_head.size());
  const auto size = static_cast<int64_t>(text.size());
  absl::StatusOr<std::vector<TokenId>> ids =
      tokenizer.Encode(absl::StrCat(turn_head, text), dropped, {{begin, begin + size}});
  if (!ids.ok()) {
    RETURN_IF_ERROR(tokenizer.Encode(text, nullptr, {{0, size}}).status());
    return ids;
  }
  if (dropped != nullptr && dropped->first_offset >= begin) dropped->first_offset -= begin;
  // What a chat begins with is the template's to say.
  const TokenId bos = turn_head.empty() ? tokenizer.bos_token_id() : -1;
  if (bos >= 0 && (ids->empty() || ids->front() != bos)) ids->insert(ids->begin(), bos);
  return ids;
}

absl::StatusOr<DocumentText> DocumentText::Create(std::vector<TokenId> tokens,
                                                  const model::Tokenizer& tokenizer,
                                                  absl::string_view turn_head) {
  DocumentText document;
  ASSIGN_OR_RETURN(const TextBegin begin, FindTextBegin(tokens, tokenizer, turn_head));
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
  document.text_.erase(0, static_cast<size_t>(begin.bytes));
  for (int64_t& end : document.ends_) end = std::max<int64_t>(0, end - begin.bytes);
  document.FindPassages(begin.token);
  return document;
}

void DocumentText::FindPassages(Position first) {
  const auto tokens = static_cast<Position>(tokens_.size());
  const std::vector<int64_t> begins = SentenceBegins(text_);
  Position from = first;
  const auto close = [&](Position until) {
    const int64_t pieces = (until - from + kPassageTokens - 1) / kPassageTokens;
    for (int64_t i = 0; i < pieces; ++i) {
      passages_.push_back(
          {from + (until - from) * i / pieces, from + (until - from) * (i + 1) / pieces});
    }
    from = until;
  };
  size_t next = 1;
  for (Position token = from; token < tokens; ++token) {
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
