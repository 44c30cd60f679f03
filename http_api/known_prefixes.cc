#include "http_api/known_prefixes.h"

#include <algorithm>
#include <utility>

#include "absl/hash/hash.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::http_api {
namespace {

using Tokens = absl::Span<const TokenId>;

// The hash of the blocks so far, and of one more.
uint64_t Chain(uint64_t before, Tokens block) { return absl::HashOf(before, block); }

// Appends the bytes of a token in the middle of a text; false: it is a control token, or none.
bool AppendText(const model::Tokenizer& tokenizer, TokenId id, std::string& text) {
  model::Tokenizer::DecodeState state = {.at_start = false};
  std::string with, without;
  if (!tokenizer.DecodeNext(id, /*skip_special=*/false, &state, &with).ok()) return false;
  state = {.at_start = false};
  if (!tokenizer.DecodeNext(id, /*skip_special=*/true, &state, &without).ok()) return false;
  if (with != without) return false;
  text += with;
  return true;
}

}  // namespace

void KnownPrefixes::Add(const std::string& key, Tokens document) {
  if (document.size() < kBlock + kSeam) return;
  uint64_t hash = 0;
  for (size_t at = 0; at + kBlock + kSeam <= document.size(); at += kBlock) {
    hash = Chain(hash, document.subspan(at, kBlock));
  }
  by_hash_.insert({hash, {key, document.size()}});
}

void KnownPrefixes::Remove(const std::string& key) {
  std::erase_if(by_hash_, [&](const auto& entry) { return entry.second.key == key; });
}

std::vector<std::string> KnownPrefixes::Candidates(Tokens prompt) const {
  std::vector<Known> found;
  uint64_t hash = 0;
  for (size_t at = 0; at + kBlock <= prompt.size(); at += kBlock) {
    hash = Chain(hash, prompt.subspan(at, kBlock));
    const auto [first, last] = by_hash_.equal_range(hash);
    for (auto it = first; it != last; ++it) found.push_back(it->second);
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Known& a, const Known& b) { return a.tokens > b.tokens; });
  std::vector<std::string> keys;
  for (Known& known : found) keys.push_back(std::move(known.key));
  return keys;
}

size_t CommonPrefix(Tokens a, Tokens b) {
  const size_t n = std::min(a.size(), b.size());
  return static_cast<size_t>(std::mismatch(a.begin(), a.begin() + n, b.begin()).first - a.begin());
}

std::optional<std::vector<TokenId>> RestOf(Tokens prompt, Tokens document,
                                           const model::Tokenizer& tokenizer) {
  const size_t same = CommonPrefix(prompt, document);
  if (document.size() - same > KnownPrefixes::kSeam) return std::nullopt;
  std::string wanted;  // what is left of the document there
  for (const TokenId id : document.subspan(same)) {
    if (!AppendText(tokenizer, id, wanted)) return std::nullopt;
  }
  std::string text;
  size_t at = same;
  while (text.size() < wanted.size()) {
    if (at == prompt.size() || !AppendText(tokenizer, prompt[at++], text)) return std::nullopt;
  }
  if (text.compare(0, wanted.size(), wanted) != 0) return std::nullopt;
  const std::string behind = text.substr(wanted.size());
  std::vector<TokenId> rest;
  if (!behind.empty()) {
    const auto size = static_cast<int64_t>(behind.size());
    const auto encoded = tokenizer.Encode(behind, nullptr, {{0, size}});
    if (!encoded.ok()) return std::nullopt;  // it begins inside a character
    std::string again;
    for (const TokenId id : *encoded) {
      if (!AppendText(tokenizer, id, again)) return std::nullopt;
    }
    if (again != behind) return std::nullopt;
    rest = *encoded;
  }
  rest.insert(rest.end(), prompt.begin() + static_cast<std::ptrdiff_t>(at), prompt.end());
  if (rest.empty()) return std::nullopt;
  return rest;
}

}  // namespace carrel::http_api
