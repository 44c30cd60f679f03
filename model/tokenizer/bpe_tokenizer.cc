#include "model/tokenizer/bpe_tokenizer.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <future>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "common/checksum.h"
#include "common/shown.h"
#include "common/status.h"
#include "model/tokenizer/bpe_model.h"
#include "model/tokenizer/byte_alphabet.h"
#include "model/tokenizer/unicode.h"
#include "model/tokenizer/utf8.h"

namespace carrel::model {
namespace {

struct Token {
  std::string text;  // bytes
  bool used = false;
  bool special = false;
};

// What one Encode works with. Views in `words` are of the text or of `owned`.
struct Work {
  struct Word {
    size_t begin;  // in ids
    size_t count;
    int64_t dropped;
  };
  std::vector<TokenId> ids;
  std::deque<std::string> owned;
  std::vector<absl::string_view> pieces;
  absl::flat_hash_map<absl::string_view, Word> words;
  BpeModel::Scratch scratch;
  absl::string_view text;       // what offsets are of
  Tokenizer::Dropped* dropped;  // null: bytes without a token are refused
  bool recognise = true;        // tokens that are matched in the normalized text
};

class BpeTokenizer final : public Tokenizer {
 public:
  // own: one more than the largest id that is not of an added token alone.
  BpeTokenizer(std::vector<Token> tokens, int64_t own, AddedTokenMatcher raw,
               AddedTokenMatcher normalized, std::vector<NormalizerStep> normalizer,
               Pretokenizer pretokenizer, BpeModel bpe, bool drops_first_space, TokenId bos,
               std::string sha256)
      : tokens_(std::move(tokens)),
        own_(own),
        raw_(std::move(raw)),
        normalized_(std::move(normalized)),
        normalizer_(std::move(normalizer)),
        pretokenizer_(std::move(pretokenizer)),
        bpe_(std::move(bpe)),
        drops_first_space_(drops_first_space) {
    bos_token_id_ = bos;
    sha256_ = std::move(sha256);
  }

  absl::StatusOr<std::vector<TokenId>> EncodeText(
      absl::string_view text, Dropped* dropped, absl::Span<const PlainRange> plain) const override {
    RETURN_IF_ERROR(ValidateUtf8(text));
    Work work;
    work.text = text;
    work.dropped = dropped;
    std::vector<TextSpan> spans;
    raw_.Split(text, &spans, plain);
    work.recognise = plain.empty();
    for (const TextSpan& span : spans) {
      if (span.id >= 0) {
        work.ids.push_back(span.id);
      } else {
        RETURN_IF_ERROR(EncodeNormalized(span.text, &work));
      }
    }
    return std::move(work.ids);
  }

  absl::Status DecodeNext(TokenId id, bool skip_special, DecodeState* state,
                          std::string* text) const override {
    if (id < 0 || id >= vocab_size() || !tokens_[static_cast<size_t>(id)].used) {
      return absl::InvalidArgumentError(absl::StrCat(
          "decode: token id ", id, " is not in the vocabulary (vocab_size ", vocab_size(), ")"));
    }
    const Token& token = tokens_[static_cast<size_t>(id)];
    if ((skip_special && token.special) || token.text.empty()) return absl::OkStatus();
    const bool drops = drops_first_space_ && state->at_start && token.text[0] == ' ';
    text->append(token.text, drops ? 1 : 0);
    state->at_start = false;
    return absl::OkStatus();
  }

  int64_t vocab_size() const override { return static_cast<int64_t>(tokens_.size()); }

  void DropTokensFrom(int64_t vocab_size) override {
    if (own_ > vocab_size || bos_token_id() >= vocab_size) return;
    if (vocab_size < this->vocab_size()) tokens_.resize(static_cast<size_t>(vocab_size));
    raw_.DropFrom(vocab_size);
    normalized_.DropFrom(vocab_size);
  }

 private:
  absl::Status EncodeNormalized(absl::string_view text, Work* work) const {
    const bool at_start = text.data() == work->text.data();
    if (!normalizer_.empty()) {
      ASSIGN_OR_RETURN(std::string normal, Normalize(normalizer_, text));
      if (normal != text) text = work->owned.emplace_back(std::move(normal));
    }
    std::vector<TextSpan> spans;
    // Offsets in the normalized text are not those of the ranges: where there are any, none of these
    // tokens is recognised.
    if (work->recognise) {
      normalized_.Split(text, &spans);
    } else if (!text.empty()) {
      spans.push_back({-1, text});
    }
    for (const TextSpan& span : spans) {
      if (span.id >= 0) {
        work->ids.push_back(span.id);
        continue;
      }
      RETURN_IF_ERROR(pretokenizer_.Split(span.text, at_start && span.text.data() == text.data(),
                                          &work->owned, &work->pieces));
      const int64_t dropped = work->dropped == nullptr ? 0 : work->dropped->bytes;
      for (const absl::string_view piece : work->pieces) {
        const absl::Status status = EncodeWord(piece, work);
        if (!status.ok()) return Located(status, text, span.text, work->text);
      }
      if (work->dropped != nullptr && work->dropped->bytes > dropped &&
          work->dropped->first_offset < 0) {
        const size_t at = FirstMissing(span.text);
        work->dropped->first_offset =
            OffsetIn(work->text, text, span.text) + static_cast<int64_t>(at);
        work->dropped->first_byte = static_cast<uint8_t>(span.text[at]);
      }
    }
    return absl::OkStatus();
  }

  // A piece may be of a copy (with a space before it): but what is missing is missing everywhere.
  size_t FirstMissing(absl::string_view span) const {
    size_t at = 0;
    for (size_t size = 0; at < span.size(); at += size) {
      size = bpe_.UnitSize(span.substr(at));
      if (bpe_.Missing(span.substr(at, size)) || at + size >= span.size()) break;
    }
    return at;
  }

  // Where a part of `normalized` begins in the text, or in `normalized` if that is a copy.
  static int64_t OffsetIn(absl::string_view text, absl::string_view normalized,
                          absl::string_view part) {
    const std::less_equal<const char*> le;
    const bool inside =
        le(text.data(), part.data()) && le(part.data() + part.size(), text.data() + text.size());
    return part.data() - (inside ? text.data() : normalized.data());
  }

  absl::Status Located(const absl::Status& status, absl::string_view normalized,
                       absl::string_view span, absl::string_view text) const {
    const size_t at = FirstMissing(span);
    if (span.empty() || !bpe_.Missing(span.substr(at, bpe_.UnitSize(span.substr(at))))) {
      return status;
    }
    const int64_t offset = OffsetIn(text, normalized, span) + static_cast<int64_t>(at);
    return absl::Status(status.code(),
                        absl::StrCat(status.message(), ", at byte offset ", offset, " of ",
                                     text.size(), " (--missing-bytes drop leaves such bytes out)"));
  }

  absl::Status EncodeWord(absl::string_view word, Work* work) const {
    constexpr size_t kLongestKept = 256;  // longer words do not come again
    const auto known = word.size() <= kLongestKept ? work->words.find(word) : work->words.end();
    std::vector<TokenId>& ids = work->ids;
    if (known != work->words.end()) {
      const Work::Word earlier = known->second;
      if (work->dropped != nullptr) work->dropped->bytes += earlier.dropped;
      for (size_t i = 0; i < earlier.count; ++i) {
        const TokenId id = ids[earlier.begin + i];
        ids.push_back(id);
      }
      return absl::OkStatus();
    }
    const size_t begin = ids.size();
    int64_t dropped = 0;
    RETURN_IF_ERROR(
        bpe_.Encode(word, &work->scratch, &ids, work->dropped == nullptr ? nullptr : &dropped));
    if (work->dropped != nullptr) work->dropped->bytes += dropped;
    if (word.size() <= kLongestKept) work->words[word] = {begin, ids.size() - begin, dropped};
    return absl::OkStatus();
  }

  std::vector<Token> tokens_;  // by id
  const int64_t own_;
  AddedTokenMatcher raw_;         // matched in the text as given
  AddedTokenMatcher normalized_;  // matched in the normalized text
  const std::vector<NormalizerStep> normalizer_;
  const Pretokenizer pretokenizer_;
  const BpeModel bpe_;
  const bool drops_first_space_;
};

// The bytes that a token of the vocabulary is looked up by; nothing: it is not spelled so.
std::optional<std::string> SpelledBytes(const TokenizerJson& json, const std::string& token) {
  if (json.characters) return token;
  return BytesOfToken(token);
}

// What a token of characters says: <0x0A> is a byte.
std::string TextOfCharacters(const std::string& token) {
  uint32_t byte = 0;
  if (token.size() == 6 && absl::StartsWith(token, "<0x") && token[5] == '>' &&
      absl::SimpleHexAtoi(token.substr(3, 2), &byte)) {
    return std::string(1, static_cast<char>(byte));
  }
  return absl::StrReplaceAll(token, {{kSpaceSymbol, " "}});
}

// Puts vocabulary and added tokens into one table by id; the vocabulary's tokens as bytes.
absl::StatusOr<std::vector<Token>> MakeTable(const std::string& path, const TokenizerJson& json,
                                             const std::vector<AddedToken>& added) {
  TokenId largest = -1;
  for (const auto& [token, id] : json.vocab) largest = std::max(largest, id);
  for (const AddedToken& token : added) largest = std::max(largest, token.id);
  if (largest < 0) return absl::InvalidArgumentError(absl::StrCat(path, ": no tokens"));
  std::vector<Token> table(static_cast<size_t>(largest) + 1);
  absl::flat_hash_map<absl::string_view, TokenId> ids;  // of what is added and in the vocabulary
  absl::flat_hash_set<absl::string_view> contents;
  for (const AddedToken& token : added) contents.insert(token.content);
  std::vector<absl::string_view> names(table.size());
  for (const auto& [token, id] : json.vocab) {
    std::optional<std::string> bytes =
        json.characters ? TextOfCharacters(token) : BytesOfToken(token);
    // A token that is not spelled in the byte alphabet stands for what it says.
    table[static_cast<size_t>(id)] = {bytes.has_value() ? *std::move(bytes) : token, true, false};
    if (contents.contains(token)) ids[token] = id;
    names[static_cast<size_t>(id)] = token;
  }
  for (const AddedToken& token : added) {
    const auto in_vocab = ids.find(token.content);
    Token& entry = table[static_cast<size_t>(token.id)];
    if (in_vocab != ids.end() && in_vocab->second != token.id) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": added token \"", Shown(token.content),
                                                     "\" has id ", token.id, ", in model.vocab ",
                                                     in_vocab->second));
    }
    if (entry.used && in_vocab == ids.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": id ", token.id, " belongs to the added token \"", Shown(token.content),
          "\" and in model.vocab to \"", Shown(names[static_cast<size_t>(token.id)]), "\""));
    }
    entry = {token.content, true, token.special};
    if (!json.characters) continue;
    if (token.normalized) {  // as it stands where it is found
      ASSIGN_OR_RETURN(entry.text, Normalize(json.normalizer, token.content));
    }
    entry.text = TextOfCharacters(entry.text);
  }
  return table;
}

// What stands for the bytes that the vocabulary has no token for.
absl::StatusOr<BpeModel::Substitutes> MakeSubstitutes(const std::string& path,
                                                      const TokenizerJson& json,
                                                      const BpeModel& bpe) {
  BpeModel::Substitutes result;
  bool incomplete = json.characters;
  for (int byte = 0; byte < 256; ++byte) {
    incomplete = incomplete || bpe.byte_id(static_cast<uint8_t>(byte)) < 0;
  }
  if (!incomplete) return result;
  absl::flat_hash_map<absl::string_view, TokenId> ids;
  for (const auto& [token, id] : json.vocab) ids[token] = id;
  if (json.unk_token.has_value()) {
    const auto unknown = ids.find(*json.unk_token);
    if (unknown == ids.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": model.unk_token \"", Shown(*json.unk_token), "\" is not in model.vocab"));
    }
    result.unknown = unknown->second;
    result.fuse_unknown = json.fuse_unk;
  }
  for (int byte = 0; json.byte_fallback && byte < 256; ++byte) {
    // The bytes of the character that spells this one; all of them have a token, or none counts.
    std::vector<TokenId>& tokens = result.by_byte[static_cast<size_t>(byte)];
    const std::string one(1, static_cast<char>(byte));
    const std::string spelled = json.characters ? one : TokenOfBytes(one);
    for (const char c : spelled) {
      const auto token = ids.find(absl::StrFormat("<0x%02X>", static_cast<uint8_t>(c)));
      if (token != ids.end()) tokens.push_back(token->second);
    }
    if (tokens.size() != spelled.size()) tokens.clear();
  }
  return result;
}

// Merges by id, found as they are spelled: no name has to be brought to bytes. Nothing where one is
// of tokens that are not spelled in the byte alphabet. (It has one spelling for each string of bytes.)
std::optional<std::vector<BpeModel::IdMerge>> FindMerges(const TokenizerJson& json) {
  absl::flat_hash_map<absl::string_view, TokenId> spelled;
  spelled.reserve(json.vocab.size());
  for (const auto& [token, id] : json.vocab) {
    if (SpelledBytes(json, token).has_value()) spelled[token] = id;
  }
  std::vector<BpeModel::IdMerge> merges;
  merges.reserve(json.merges.size());
  std::string whole;
  for (const auto& [left, right] : json.merges) {
    whole = left;
    whole += right;
    const auto a = spelled.find(left), b = spelled.find(right), both = spelled.find(whole);
    if (a == spelled.end() || b == spelled.end() || both == spelled.end()) return std::nullopt;
    merges.push_back({a->second, b->second, both->second});
  }
  return merges;
}

// The same by bytes, or the error that says what is wrong.
absl::StatusOr<BpeModel> MakeBpeByBytes(const std::string& path, const TokenizerJson& json,
                                        absl::flat_hash_map<std::string, TokenId> vocab) {
  std::vector<std::pair<std::string, std::string>> merges;
  merges.reserve(json.merges.size());
  for (const auto& [left, right] : json.merges) {
    std::optional<std::string> left_bytes = SpelledBytes(json, left);
    std::optional<std::string> right_bytes = SpelledBytes(json, right);
    if (!left_bytes.has_value() || !right_bytes.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": model.merges: \"", Shown(left),
                                                     "\" \"", Shown(right),
                                                     "\" is not spelled in the byte alphabet"));
    }
    merges.emplace_back(*std::move(left_bytes), *std::move(right_bytes));
  }
  absl::StatusOr<BpeModel> bpe = BpeModel::Create(std::move(vocab), merges, json.ignore_merges);
  if (!bpe.ok()) return Annotate(bpe.status(), absl::StrCat(path, ": model"));
  return bpe;
}

absl::StatusOr<BpeModel> MakeBpe(const std::string& path, const TokenizerJson& json,
                                 const std::optional<std::vector<BpeModel::IdMerge>>& merges) {
  absl::flat_hash_map<std::string, TokenId> vocab;
  vocab.reserve(json.vocab.size());
  for (const auto& [token, id] : json.vocab) {
    std::optional<std::string> bytes = SpelledBytes(json, token);
    if (bytes.has_value()) vocab[*std::move(bytes)] = id;
  }
  absl::StatusOr<BpeModel> bpe =
      merges.has_value() ? BpeModel::CreateFromIds(std::move(vocab), *merges, json.ignore_merges)
                         : MakeBpeByBytes(path, json, std::move(vocab));
  RETURN_IF_ERROR(bpe.status());
  if (json.characters) bpe->PairCharacters();
  absl::StatusOr<BpeModel::Substitutes> substitutes = MakeSubstitutes(path, json, *bpe);
  RETURN_IF_ERROR(substitutes.status());
  bpe->SetSubstitutes(*std::move(substitutes));
  return bpe;
}

absl::StatusOr<TokenId> FindBos(const std::string& path, const TokenizerConfig& config,
                                const TokenizerJson& json, const std::vector<AddedToken>& added) {
  if (!config.add_bos_token.has_value()) return json.template_bos;
  if (!*config.add_bos_token) return -1;
  if (!config.bos_token.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokenizer_config.json beside ", path,
                     ": add_bos_token is true, and there is no bos_token"));
  }
  for (const AddedToken& token : added) {
    if (token.content == *config.bos_token) return token.id;
  }
  for (const auto& [token, id] : json.vocab) {
    if (token == *config.bos_token) return id;
  }
  return absl::InvalidArgumentError(absl::StrCat(path, ": has no token \"",
                                                 Shown(*config.bos_token),
                                                 "\", tokenizer_config.json's bos_token"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> CreateBpeTokenizer(const std::string& path,
                                                              absl::string_view bytes,
                                                              const TokenizerJson& json,
                                                              const TokenizerConfig& config) {
  std::vector<AddedToken> added = json.added_tokens;
  std::string changes;
  RETURN_IF_ERROR(MergeAddedTokens("tokenizer_config.json beside " + path, config.added_tokens,
                                   &added, &changes));
  // Half of what loading takes, by another thread where there is one.
  std::future<std::optional<std::vector<BpeModel::IdMerge>>> merges =
      std::async(std::launch::async | std::launch::deferred, [&json] { return FindMerges(json); });
  ASSIGN_OR_RETURN(std::vector<Token> table, MakeTable(path, json, added));
  const std::string sha256 = Sha256Hex(absl::StrCat(bytes, changes));
  ASSIGN_OR_RETURN(BpeModel bpe, MakeBpe(path, json, merges.get()));
  ASSIGN_OR_RETURN(const TokenId bos, FindBos(path, config, json, added));
  if (bos >= static_cast<TokenId>(table.size()) || (bos >= 0 && !table[bos].used)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": post_processor names id ", bos, ", which is no token"));
  }
  absl::StatusOr<Pretokenizer> pretokenizer = Pretokenizer::Create(json.pretokenizer);
  if (!pretokenizer.ok()) {
    return Annotate(pretokenizer.status(), absl::StrCat(path, ": pre_tokenizer"));
  }
  std::vector<AddedToken> raw, normalized;
  for (AddedToken& token : added) {
    if (token.normalized) {
      ASSIGN_OR_RETURN(token.content, Normalize(json.normalizer, token.content));
    }
    (token.normalized ? normalized : raw).push_back(std::move(token));
  }
  TokenId largest = -1;
  for (const auto& [token, id] : json.vocab) largest = std::max(largest, id);
  return std::make_unique<BpeTokenizer>(
      std::move(table), int64_t{largest} + 1, AddedTokenMatcher(std::move(raw)),
      AddedTokenMatcher(std::move(normalized)), json.normalizer, *std::move(pretokenizer),
      std::move(bpe), json.drops_first_space, bos, sha256);
}

}  // namespace carrel::model
