// What:   which known document a prompt begins with.
// Math:   the prompt's tokens are hashed as a chain, block by block of kBlock; of a document the hash
//         of its whole blocks is kept, but for those that its last kSeam tokens touch. An equal hash
//         makes a candidate; RestOf compares all tokens, and says what follows the document.
// Edge:   the text behind a document can change its last tokens ("end." and "end.\n\n" may end
//         differently): up to kSeam of them are given up (decoder::GenerateOptions), and the prompt's own
//         stand there. Documents of less than kBlock + kSeam tokens are not known.
// Threads: as std::map.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/types/span.h"
#include "common/ids.h"

namespace carrel::serving {

class KnownPrefixes {
 public:
  static constexpr size_t kBlock = 256, kSeam = 16;

  // key: of the caller's choosing; one document each.
  void Add(const std::string& key, absl::Span<const TokenId> document);
  void Remove(const std::string& key);

  // Keys of documents that the prompt may begin with, the longest first.
  std::vector<std::string> Candidates(absl::Span<const TokenId> prompt) const;

 private:
  struct Known {
    std::string key;
    size_t tokens = 0;
  };
  std::unordered_multimap<uint64_t, Known> by_hash_;
};

struct PrefixRest {
  int64_t give_up = 0;        // of the document's last tokens
  std::vector<TokenId> rest;  // of the prompt, never empty
};
// The prompt, whatever it is, as what follows the document, of which at most so many tokens are given up;
// none: that is not enough.
std::optional<PrefixRest> RestOf(absl::Span<const TokenId> prompt,
                                 absl::Span<const TokenId> document, int64_t most_given_up);

// How many tokens two sequences begin with in common.
size_t CommonPrefix(absl::Span<const TokenId> a, absl::Span<const TokenId> b);

}  // namespace carrel::serving
