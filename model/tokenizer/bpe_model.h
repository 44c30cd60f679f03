// What:   byte pair encoding of one piece of text: the pair with the lowest rank (leftmost first)
//         is merged until no pair is known. What is paired at first are bytes, or characters.
// Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", section
//         3.2, over bytes.
// Errors: InvalidArgument, naming the merge, two halves or a whole that are not in the vocabulary;
//         a byte or character for which nothing stands.
// Threads: immutable, reentrant.     Cost: O(n log n) for a piece of n bytes.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/ids.h"

namespace carrel::model {

class BpeModel {
 public:
  // What one caller reuses from piece to piece.
  class Scratch {
    friend class BpeModel;
    struct Symbol {
      TokenId id;
      int32_t previous;
      int32_t next;
    };
    struct Candidate {
      int32_t rank;
      int32_t left;  // index of the left symbol
      TokenId left_id;
      TokenId right_id;
      TokenId merged;
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  // `vocab` maps bytes to ids; merges are halves in bytes, by rank. A pair that is listed twice has
  // its last rank. `whole_words`: a piece that is a token is not merged up (ignore_merges).
  static absl::StatusOr<BpeModel> Create(
      absl::flat_hash_map<std::string, TokenId> vocab,
      const std::vector<std::pair<std::string, std::string>>& merges, bool whole_words);

  // The same of merges by ids of `vocab`, which the caller looked up.
  struct IdMerge {
    TokenId left;
    TokenId right;
    TokenId merged;
  };
  static BpeModel CreateFromIds(absl::flat_hash_map<std::string, TokenId> vocab,
                                absl::Span<const IdMerge> merges, bool whole_words);

  // What stands for a byte that has no token of its own, as in Hugging Face's BPE.
  struct Substitutes {
    std::array<std::vector<TokenId>, 256> by_byte;  // byte_fallback; empty: none
    TokenId unknown = -1;                           // where by_byte has none; -1: nothing
    bool fuse_unknown = false;                      // neighbouring unknown bytes are one token
  };
  void SetSubstitutes(Substitutes substitutes) { substitutes_ = std::move(substitutes); }

  // Pairs characters: a token is looked up for each, and else its bytes' substitutes, if all have some.
  void PairCharacters() { characters_ = true; }

  // How many bytes of `text`, which is not empty, are one thing, and whether nothing stands for it.
  size_t UnitSize(absl::string_view text) const;
  bool Missing(absl::string_view unit) const {
    return UnitId(unit) < 0 && !HasSubstitutes(unit) && substitutes_.unknown < 0;
  }

  // Appends the tokens of `piece`; on an error nothing is appended. Missing bytes are an error if
  // `dropped` is null, else left out and counted.
  absl::Status Encode(absl::string_view piece, Scratch* scratch, std::vector<TokenId>* ids,
                      int64_t* dropped = nullptr) const;

  // The token of a single byte, or -1.
  TokenId byte_id(uint8_t byte) const { return byte_ids_[byte]; }

 private:
  struct Merge {
    int32_t rank;
    TokenId merged;
  };

  TokenId UnitId(absl::string_view unit) const;  // or -1
  bool HasSubstitutes(absl::string_view unit) const;
  absl::Status FillSymbols(absl::string_view piece, Scratch* scratch, int64_t* dropped) const;
  void PushCandidate(int32_t left, Scratch* scratch) const;

  absl::flat_hash_map<std::string, TokenId> vocab_;
  absl::flat_hash_map<std::pair<TokenId, TokenId>, Merge> merges_;
  std::array<TokenId, 256> byte_ids_{};
  Substitutes substitutes_;
  bool whole_words_ = false;
  bool characters_ = false;
};

}  // namespace carrel::model
