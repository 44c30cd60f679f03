#include "model/tokenizer/seam.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "common/status.h"
#include "model/tokenizer/utf8.h"

namespace carrel::model {
namespace {

using Tokens = absl::Span<const TokenId>;

// How far back places are tried, nearest first, and how many of them.
constexpr size_t kBack[] = {64, 128, kSeamTail};
constexpr size_t kPlaces = 24;
// Of the prompt: what decides the tokens at the seam.
constexpr size_t kHeadBytes = 256;

size_t CommonPrefix(Tokens a, Tokens b) {
  const size_t n = std::min(a.size(), b.size());
  return static_cast<size_t>(std::mismatch(a.begin(), a.begin() + n, b.begin()).first - a.begin());
}

absl::string_view HeadOf(absl::string_view prompt) {
  if (prompt.size() <= kHeadBytes) return prompt;
  return prompt.substr(0, CompleteUtf8Size(prompt.substr(0, kHeadBytes)));
}

class Joining {
 public:
  // plain_tail: nothing of the document's text is an added token.
  Joining(const Tokenizer& tokenizer, Tokens tail, bool plain_tail, absl::string_view prompt,
          absl::Span<const PlainRange> plain)
      : tokenizer_(tokenizer),
        tail_(tail),
        plain_tail_(plain_tail),
        prompt_(prompt),
        plain_(plain) {}

  // exact: the first token of the tail begins a word for certain.
  std::optional<std::vector<TokenId>> Run(bool exact) const {
    if (exact) return From(0);
    for (const size_t back : kBack) {
      if (back > tail_.size()) break;
      const std::optional<size_t> place = PlaceOf(tail_.size() - back);
      if (place.has_value()) return From(*place);
    }
    return std::nullopt;
  }

 private:
  // The text behind place `at`, if its tokens are the tail's there.
  std::optional<std::string> TextFrom(size_t at) const {
    const Tokens rest = tail_.subspan(at);
    absl::StatusOr<std::string> text = tokenizer_.Decode(rest, /*skip_special=*/false);
    if (!text.ok()) return std::nullopt;
    const auto again = Encode(*text, "");
    if (!again.has_value() || Tokens(*again) != rest) return std::nullopt;
    return *std::move(text);
  }

  std::optional<std::vector<TokenId>> Encode(const std::string& text,
                                             absl::string_view prompt) const {
    const auto size = static_cast<int64_t>(text.size());
    std::vector<PlainRange> plain;
    if (plain_tail_) plain.push_back({0, size});
    for (const PlainRange& range : plain_) {
      if (range.begin < static_cast<int64_t>(prompt.size()))
        plain.push_back({range.begin + size, range.end + size});
    }
    Tokenizer::Dropped dropped;  // told of the prompt alone
    absl::StatusOr<std::vector<TokenId>> ids =
        tokenizer_.Encode(absl::StrCat(text, prompt), &dropped, plain);
    if (!ids.ok()) return std::nullopt;
    return *std::move(ids);
  }

  // The first of some places from `begin` on, if all that may be right agree.
  std::optional<size_t> PlaceOf(size_t begin) const {
    std::optional<size_t> place;
    std::vector<TokenId> first;
    for (size_t at = begin; at < begin + kPlaces; ++at) {
      const std::optional<std::string> text = TextFrom(at);
      if (!text.has_value()) continue;
      const auto ids = Encode(*text, HeadOf(prompt_));
      if (!ids.has_value()) return std::nullopt;
      std::vector<TokenId> all(tail_.begin() + static_cast<std::ptrdiff_t>(begin),
                               tail_.begin() + static_cast<std::ptrdiff_t>(at));
      all.insert(all.end(), ids->begin(), ids->end());
      if (place.has_value() && all != first) return std::nullopt;
      if (!place.has_value()) {
        place = at;
        first = std::move(all);
      }
    }
    return place;
  }

  // The tail's tokens and the prompt's, joined at that place.
  std::optional<std::vector<TokenId>> From(size_t at) const {
    const std::optional<std::string> text = TextFrom(at);
    if (!text.has_value()) return std::nullopt;
    const auto ids = Encode(*text, prompt_);
    if (!ids.has_value() || MakesControl(tail_.subspan(at), *ids, text->size())) {
      return std::nullopt;
    }
    std::vector<TokenId> all(tail_.begin(), tail_.begin() + static_cast<std::ptrdiff_t>(at));
    all.insert(all.end(), ids->begin(), ids->end());
    return all;
  }

  // Whether a control token among them begins within the first `size` bytes, which hold none.
  bool MakesControl(Tokens rest, Tokens ids, size_t size) const {
    const size_t same = CommonPrefix(rest, ids);
    std::string text;
    Tokenizer::DecodeState state;
    for (size_t i = 0; i < ids.size() && text.size() < size; ++i) {
      if (i >= same && IsControl(tokenizer_, ids[i])) return true;
      if (!tokenizer_.DecodeNext(ids[i], /*skip_special=*/false, &state, &text).ok()) return true;
    }
    return false;
  }

  const Tokenizer& tokenizer_;
  const Tokens tail_;
  const bool plain_tail_;
  const absl::string_view prompt_;
  const absl::Span<const PlainRange> plain_;
};

}  // namespace

bool IsControl(const Tokenizer& tokenizer, TokenId id) {
  const auto hidden = tokenizer.Decode({id}, /*skip_special=*/true);
  const auto shown = tokenizer.Decode({id}, /*skip_special=*/false);
  return hidden.ok() && shown.ok() && hidden->empty() && !shown->empty();
}

absl::StatusOr<Seam> JoinTokens(const Tokenizer& tokenizer, Tokens tail, int64_t most_given_up,
                                absl::string_view prompt, Tokenizer::Dropped* dropped,
                                absl::Span<const PlainRange> plain) {
  Seam apart;
  apart.whole = false;
  ASSIGN_OR_RETURN(apart.tokens, tokenizer.Encode(prompt, dropped, plain));
  if (tail.empty() || apart.tokens.empty()) return apart;
  const bool all = tail.size() < kSeamTail;
  if (tail.size() > kSeamTail) tail.remove_prefix(tail.size() - kSeamTail);
  const auto control = std::find_if(tail.rbegin(), tail.rend(),
                                    [&](TokenId id) { return IsControl(tokenizer, id); });
  const auto text_tokens = static_cast<size_t>(control - tail.rbegin());
  const bool exact = all || control != tail.rend();
  tail = tail.last(text_tokens);
  if (tail.empty()) {  // what follows a control token is a text of its own
    apart.whole = true;
    return apart;
  }
  for (const bool plain_tail : {false, true}) {
    const auto joined = Joining(tokenizer, tail, plain_tail, prompt, plain).Run(exact);
    if (!joined.has_value()) continue;
    const size_t same = CommonPrefix(tail, *joined);
    const auto give_up = static_cast<int64_t>(tail.size() - same);
    if (give_up > most_given_up || same == joined->size()) return apart;
    return Seam{give_up, {joined->begin() + static_cast<std::ptrdiff_t>(same), joined->end()}};
  }
  return apart;
}

}  // namespace carrel::model
