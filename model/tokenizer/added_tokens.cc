#include "model/tokenizer/added_tokens.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/shown.h"
#include "model/tokenizer/unicode.h"
#include "model/tokenizer/utf8.h"

namespace carrel::model {
namespace {

size_t WhiteSpaceAtStart(absl::string_view text) {
  size_t size = 0;
  while (true) {
    const Utf8Char next = DecodeUtf8(text.substr(size));
    if (next.size == 0 || !IsWhiteSpace(next.code_point)) return size;
    size += next.size;
  }
}

size_t WhiteSpaceAtEnd(absl::string_view text) {
  size_t size = 0;
  while (true) {
    const Utf8Char last = DecodeLastUtf8(text.substr(0, text.size() - size));
    if (last.size == 0 || !IsWhiteSpace(last.code_point)) return size;
    size += last.size;
  }
}

bool TouchesWord(absl::string_view before, absl::string_view after) {
  const Utf8Char last = DecodeLastUtf8(before);
  const Utf8Char next = DecodeUtf8(after);
  return (last.size > 0 && IsWordCharacter(last.code_point)) ||
         (next.size > 0 && IsWordCharacter(next.code_point));
}

}  // namespace

absl::Status MergeAddedTokens(const std::string& path, const std::vector<AddedToken>& more,
                              std::vector<AddedToken>* tokens, std::string* changes) {
  absl::flat_hash_map<TokenId, size_t> by_id;
  absl::flat_hash_map<std::string, TokenId> ids;
  for (size_t i = 0; i < tokens->size(); ++i) {
    by_id[(*tokens)[i].id] = i;
    ids[(*tokens)[i].content] = (*tokens)[i].id;
  }
  for (const AddedToken& token : more) {
    const auto [place, new_id] = by_id.try_emplace(token.id, tokens->size());
    const auto [entry, new_content] = ids.try_emplace(token.content, token.id);
    if (entry->second != token.id) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": added token \"", Shown(token.content),
                                                     "\" has id ", token.id, " here and ",
                                                     entry->second, " elsewhere"));
    }
    if (new_content && !new_id) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": id ", token.id, " is the added token \"", Shown(token.content),
                       "\" here and \"", Shown((*tokens)[place->second].content), "\" elsewhere"));
    }
    if (new_id) {
      tokens->push_back(token);
    } else if ((*tokens)[place->second] == token) {
      continue;
    } else {
      (*tokens)[place->second] = token;
    }
    absl::StrAppend(changes, "\n", token.id, " ", token.special, token.single_word, token.lstrip,
                    token.rstrip, token.normalized, " ", token.content);
  }
  return absl::OkStatus();
}

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens)
    : tokens_(std::move(tokens)), nodes_(1) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const std::string& content = tokens_[i].content;
    if (content.empty()) continue;
    begins_[static_cast<unsigned char>(content[0])] = true;
    size_t at = 0;
    for (const char c : content) {
      const auto [entry, fresh] =
          nodes_[at].next.try_emplace(c, static_cast<int32_t>(nodes_.size()));
      at = static_cast<size_t>(entry->second);
      if (fresh) nodes_.emplace_back();
    }
    nodes_[at].token = static_cast<int32_t>(i);
  }
}

void AddedTokenMatcher::DropFrom(int64_t end) {
  std::erase_if(tokens_, [&](const AddedToken& token) { return token.id >= end; });
  *this = AddedTokenMatcher(std::move(tokens_));
}

int32_t AddedTokenMatcher::LongestPrefix(absl::string_view text) const {
  int32_t longest = -1;
  size_t at = 0;
  for (const char c : text) {
    const auto entry = nodes_[at].next.find(c);
    if (entry == nodes_[at].next.end()) break;
    at = static_cast<size_t>(entry->second);
    if (nodes_[at].token >= 0) longest = nodes_[at].token;
  }
  return longest;
}

void AddedTokenMatcher::Split(absl::string_view text, std::vector<TextSpan>* spans,
                              absl::Span<const PlainRange> plain_ranges) const {
  size_t plain = 0;  // where the text not yet handed out begins
  size_t at = 0;
  while (at < text.size()) {
    const int32_t index =
        begins_[static_cast<unsigned char>(text[at])] ? LongestPrefix(text.substr(at)) : -1;
    if (index < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(index)];
    size_t begin = at;
    size_t end = at + token.content.size();
    while (!plain_ranges.empty() && plain_ranges.front().end <= static_cast<int64_t>(begin)) {
      plain_ranges.remove_prefix(1);
    }
    if (!plain_ranges.empty() && plain_ranges.front().begin < static_cast<int64_t>(end)) {
      ++at;  // a shorter or later one may stand clear of it
      continue;
    }
    at = end;
    if (token.single_word && TouchesWord(text.substr(0, begin), text.substr(end))) continue;
    if (token.lstrip) begin -= WhiteSpaceAtEnd(text.substr(plain, begin - plain));
    if (token.rstrip) end += WhiteSpaceAtStart(text.substr(end));
    if (plain < begin) spans->push_back({-1, text.substr(plain, begin - plain)});
    spans->push_back({token.id, text.substr(begin, end - begin)});
    plain = at = end;
  }
  if (plain < text.size()) spans->push_back({-1, text.substr(plain)});
}

}  // namespace carrel::model
