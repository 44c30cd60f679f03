#include "serving/known_prefixes.h"

#include <algorithm>
#include <utility>

#include "absl/hash/hash.h"

namespace carrel::serving {
namespace {

using Tokens = absl::Span<const TokenId>;

// The hash of the blocks so far, and of one more.
uint64_t Chain(uint64_t before, Tokens block) { return absl::HashOf(before, block); }

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

std::optional<PrefixRest> RestOf(Tokens prompt, Tokens document, int64_t most_given_up) {
  if (prompt.empty()) return std::nullopt;
  const size_t same = std::min(CommonPrefix(prompt, document), prompt.size() - 1);
  const auto give_up = static_cast<int64_t>(document.size() - same);
  if (give_up > std::min(most_given_up, static_cast<int64_t>(KnownPrefixes::kSeam))) {
    return std::nullopt;
  }
  return PrefixRest{give_up, {prompt.begin() + static_cast<std::ptrdiff_t>(same), prompt.end()}};
}

}  // namespace carrel::serving
