#include "model/tokenizer/bpe_model.h"

#include <algorithm>
#include <limits>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/shown.h"
#include "common/status.h"
#include "model/tokenizer/utf8.h"

namespace carrel::model {

absl::StatusOr<BpeModel> BpeModel::Create(
    absl::flat_hash_map<std::string, TokenId> vocab,
    const std::vector<std::pair<std::string, std::string>>& merges, bool whole_words) {
  std::vector<IdMerge> by_id;
  by_id.reserve(merges.size());
  for (const auto& [left, right] : merges) {
    TokenId ids[3] = {};
    const std::string* const names[2] = {&left, &right};
    const std::string whole = left + right;
    for (int i = 0; i < 3; ++i) {
      const std::string& name = i < 2 ? *names[i] : whole;
      const auto entry = vocab.find(name);
      if (entry == vocab.end()) {
        return absl::InvalidArgumentError(
            absl::StrCat("merge ", by_id.size(), " of \"", Shown(absl::CHexEscape(left)),
                         "\" and \"", Shown(absl::CHexEscape(right)), "\": \"",
                         Shown(absl::CHexEscape(name)), "\" is not in the vocabulary"));
      }
      ids[i] = entry->second;
    }
    by_id.push_back({ids[0], ids[1], ids[2]});
  }
  return CreateFromIds(std::move(vocab), by_id, whole_words);
}

BpeModel BpeModel::CreateFromIds(absl::flat_hash_map<std::string, TokenId> vocab,
                                 absl::Span<const IdMerge> merges, bool whole_words) {
  BpeModel model;
  model.vocab_ = std::move(vocab);
  model.whole_words_ = whole_words;
  model.merges_.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const IdMerge& merge = merges[rank];
    model.merges_[{merge.left, merge.right}] = {static_cast<int32_t>(rank), merge.merged};
  }
  for (int byte = 0; byte < 256; ++byte) {
    const auto entry = model.vocab_.find(std::string(1, static_cast<char>(byte)));
    model.byte_ids_[byte] = entry == model.vocab_.end() ? -1 : entry->second;
  }
  return model;
}

namespace {

// For std::push_heap, which keeps the largest on top: the lowest rank, then the leftmost.
constexpr auto kLater = [](const auto& a, const auto& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
};

}  // namespace

void BpeModel::PushCandidate(int32_t left, Scratch* scratch) const {
  if (left < 0) return;
  const auto& symbol = scratch->symbols[static_cast<size_t>(left)];
  if (symbol.next < 0) return;
  const TokenId right_id = scratch->symbols[static_cast<size_t>(symbol.next)].id;
  const auto merge = merges_.find({symbol.id, right_id});
  if (merge == merges_.end()) return;
  scratch->heap.push_back({merge->second.rank, left, symbol.id, right_id, merge->second.merged});
  std::push_heap(scratch->heap.begin(), scratch->heap.end(), kLater);
}

size_t BpeModel::UnitSize(absl::string_view text) const {
  return characters_ ? std::max<size_t>(1, DecodeUtf8(text).size) : 1;
}

TokenId BpeModel::UnitId(absl::string_view unit) const {
  if (unit.size() == 1) return byte_ids_[static_cast<uint8_t>(unit[0])];
  const auto entry = vocab_.find(unit);
  return entry == vocab_.end() ? -1 : entry->second;
}

bool BpeModel::HasSubstitutes(absl::string_view unit) const {
  return std::all_of(unit.begin(), unit.end(), [this](char c) {
    return !substitutes_.by_byte[static_cast<uint8_t>(c)].empty();
  });
}

// One symbol per byte or character, but for those without a token. Unknown ones wait for the next that has
// a token of its own: substitutes by byte pass them, as they do in Hugging Face's BPE.
absl::Status BpeModel::FillSymbols(absl::string_view piece, Scratch* scratch,
                                   int64_t* dropped) const {
  auto& symbols = scratch->symbols;
  symbols.clear();
  const auto add = [&](TokenId id) {
    const int32_t at = static_cast<int32_t>(symbols.size());
    if (at > 0) symbols.back().next = at;
    symbols.push_back({id, at - 1, -1});
  };
  bool unknown_waits = false;
  for (absl::string_view unit; !piece.empty(); piece.remove_prefix(unit.size())) {
    unit = piece.substr(0, UnitSize(piece));
    if (const TokenId id = UnitId(unit); id >= 0) {
      if (unknown_waits) add(substitutes_.unknown);
      unknown_waits = false;
      add(id);
    } else if (HasSubstitutes(unit)) {
      for (const char c : unit) {
        for (const TokenId one : substitutes_.by_byte[static_cast<uint8_t>(c)]) add(one);
      }
    } else if (substitutes_.unknown >= 0) {
      if (unknown_waits && !substitutes_.fuse_unknown) add(substitutes_.unknown);
      unknown_waits = true;
    } else if (dropped != nullptr) {
      *dropped += static_cast<int64_t>(unit.size());
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("the vocabulary has no token for byte 0x",
                       absl::Hex(static_cast<uint8_t>(unit[0]), absl::kZeroPad2)));
    }
  }
  if (unknown_waits) add(substitutes_.unknown);
  return absl::OkStatus();
}

absl::Status BpeModel::Encode(absl::string_view piece, Scratch* scratch, std::vector<TokenId>* ids,
                              int64_t* dropped) const {
  if (whole_words_) {
    const auto whole = vocab_.find(piece);
    if (whole != vocab_.end()) {
      ids->push_back(whole->second);
      return absl::OkStatus();
    }
  }
  constexpr int32_t kMostTokensPerByte = 2;  // a character of the byte alphabet in UTF-8
  constexpr int32_t kLongest = std::numeric_limits<int32_t>::max() / kMostTokensPerByte;
  if (piece.size() > static_cast<size_t>(kLongest)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a word of ", piece.size(), " bytes exceeds ", kLongest));
  }
  RETURN_IF_ERROR(FillSymbols(piece, scratch, dropped));
  auto& symbols = scratch->symbols;
  const int32_t size = static_cast<int32_t>(symbols.size());
  scratch->heap.clear();
  for (int32_t i = 0; i + 1 < size; ++i) PushCandidate(i, scratch);
  constexpr TokenId kMergedAway = -1;
  while (!scratch->heap.empty()) {
    std::pop_heap(scratch->heap.begin(), scratch->heap.end(), kLater);
    const Scratch::Candidate best = scratch->heap.back();
    scratch->heap.pop_back();
    Scratch::Symbol& left = symbols[static_cast<size_t>(best.left)];
    if (left.id != best.left_id || left.next < 0) continue;  // merged since
    Scratch::Symbol& right = symbols[static_cast<size_t>(left.next)];
    if (right.id != best.right_id) continue;
    left.id = best.merged;
    left.next = right.next;
    right.id = kMergedAway;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = best.left;
    PushCandidate(left.previous, scratch);
    PushCandidate(best.left, scratch);
  }
  for (int32_t i = 0; i >= 0 && i < size; i = symbols[static_cast<size_t>(i)].next) {
    ids->push_back(symbols[static_cast<size_t>(i)].id);
  }
  return absl::OkStatus();
}

}  // namespace carrel::model
