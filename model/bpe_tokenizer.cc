#include "model/bpe_tokenizer.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "common/status.h"
#include "model/bpe_model.h"
#include "model/byte_alphabet.h"
#include "model/unicode.h"
#include "model/utf8.h"

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
  };
  std::vector<TokenId> ids;
  std::deque<std::string> owned;
  std::vector<absl::string_view> pieces;
  absl::flat_hash_map<absl::string_view, Word> words;
  BpeModel::Scratch scratch;
};

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(std::vector<Token> tokens, AddedTokenMatcher raw, AddedTokenMatcher normalized,
               bool nfc, Pretokenizer pretokenizer, BpeModel bpe, TokenId bos, std::string sha256)
      : tokens_(std::move(tokens)),
        raw_(std::move(raw)),
        normalized_(std::move(normalized)),
        nfc_(nfc),
        pretokenizer_(std::move(pretokenizer)),
        bpe_(std::move(bpe)) {
    bos_token_id_ = bos;
    sha256_ = std::move(sha256);
  }

  absl::StatusOr<std::vector<TokenId>> Encode(absl::string_view text) const override {
    RETURN_IF_ERROR(ValidateUtf8(text));
    Work work;
    std::vector<TextSpan> spans;
    raw_.Split(text, &spans);
    for (const TextSpan& span : spans) {
      if (span.id >= 0) {
        work.ids.push_back(span.id);
      } else {
        RETURN_IF_ERROR(EncodeNormalized(span.text, &work));
      }
    }
    return std::move(work.ids);
  }

  absl::StatusOr<std::string> Decode(absl::Span<const TokenId> ids,
                                     bool skip_special) const override {
    std::string text;
    for (const TokenId id : ids) {
      if (id < 0 || id >= vocab_size() || !tokens_[static_cast<size_t>(id)].used) {
        return absl::InvalidArgumentError(absl::StrCat(
            "decode: token id ", id, " is not in the vocabulary (vocab_size ", vocab_size(), ")"));
      }
      const Token& token = tokens_[static_cast<size_t>(id)];
      if (!(skip_special && token.special)) text.append(token.text);
    }
    return text;
  }

  int64_t vocab_size() const override { return static_cast<int64_t>(tokens_.size()); }

 private:
  absl::Status EncodeNormalized(absl::string_view text, Work* work) const {
    if (nfc_) {
      ASSIGN_OR_RETURN(std::string composed, NormalizeNfc(text));
      text = work->owned.emplace_back(std::move(composed));
    }
    std::vector<TextSpan> spans;
    normalized_.Split(text, &spans);
    for (const TextSpan& span : spans) {
      if (span.id >= 0) {
        work->ids.push_back(span.id);
        continue;
      }
      RETURN_IF_ERROR(pretokenizer_.Split(span.text, &work->owned, &work->pieces));
      for (const absl::string_view piece : work->pieces) RETURN_IF_ERROR(EncodeWord(piece, work));
    }
    return absl::OkStatus();
  }

  absl::Status EncodeWord(absl::string_view word, Work* work) const {
    constexpr size_t kLongestKept = 256;  // longer words do not come again
    const auto known = word.size() <= kLongestKept ? work->words.find(word) : work->words.end();
    std::vector<TokenId>& ids = work->ids;
    if (known != work->words.end()) {
      const Work::Word earlier = known->second;
      for (size_t i = 0; i < earlier.count; ++i) {
        const TokenId id = ids[earlier.begin + i];
        ids.push_back(id);
      }
      return absl::OkStatus();
    }
    const size_t begin = ids.size();
    RETURN_IF_ERROR(bpe_.Encode(word, &work->scratch, &ids));
    if (word.size() <= kLongestKept) work->words[word] = {begin, ids.size() - begin};
    return absl::OkStatus();
  }

  const std::vector<Token> tokens_;     // by id
  const AddedTokenMatcher raw_;         // matched in the text as given
  const AddedTokenMatcher normalized_;  // matched in the normalized text
  const bool nfc_;
  const Pretokenizer pretokenizer_;
  const BpeModel bpe_;
};

// Puts vocabulary and added tokens into one table by id; the vocabulary's tokens as bytes.
absl::StatusOr<std::vector<Token>> MakeTable(const std::string& path, const TokenizerJson& json,
                                             const std::vector<AddedToken>& added) {
  TokenId largest = -1;
  for (const auto& [token, id] : json.vocab) largest = std::max(largest, id);
  for (const AddedToken& token : added) largest = std::max(largest, token.id);
  if (largest < 0) return absl::InvalidArgumentError(absl::StrCat(path, ": no tokens"));
  std::vector<Token> table(static_cast<size_t>(largest) + 1);
  absl::flat_hash_map<absl::string_view, TokenId> ids;
  std::vector<absl::string_view> names(table.size());
  for (const auto& [token, id] : json.vocab) {
    std::optional<std::string> bytes = BytesOfToken(token);
    // A token that is not spelled in the byte alphabet stands for what it says.
    table[static_cast<size_t>(id)] = {bytes.has_value() ? *std::move(bytes) : token, true, false};
    ids[token] = id;
    names[static_cast<size_t>(id)] = token;
  }
  for (const AddedToken& token : added) {
    const auto in_vocab = ids.find(token.content);
    Token& entry = table[static_cast<size_t>(token.id)];
    if (in_vocab != ids.end() && in_vocab->second != token.id) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": added token \"", token.content,
                                                     "\" has id ", token.id, ", in model.vocab ",
                                                     in_vocab->second));
    }
    if (entry.used && in_vocab == ids.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": id ", token.id, " belongs to the added token \"", token.content,
                       "\" and in model.vocab to \"", names[static_cast<size_t>(token.id)], "\""));
    }
    entry = {token.content, true, token.special};
  }
  return table;
}

absl::StatusOr<BpeModel> MakeBpe(const std::string& path, const TokenizerJson& json) {
  absl::flat_hash_map<std::string, TokenId> vocab;
  vocab.reserve(json.vocab.size());
  for (const auto& [token, id] : json.vocab) {
    std::optional<std::string> bytes = BytesOfToken(token);
    if (bytes.has_value()) vocab[*std::move(bytes)] = id;
  }
  std::vector<std::pair<std::string, std::string>> merges;
  merges.reserve(json.merges.size());
  for (const auto& [left, right] : json.merges) {
    std::optional<std::string> left_bytes = BytesOfToken(left);
    std::optional<std::string> right_bytes = BytesOfToken(right);
    if (!left_bytes.has_value() || !right_bytes.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": model.merges: \"", left, "\" \"",
                                                     right,
                                                     "\" is not spelled in the byte alphabet"));
    }
    merges.emplace_back(*std::move(left_bytes), *std::move(right_bytes));
  }
  absl::StatusOr<BpeModel> bpe = BpeModel::Create(std::move(vocab), merges, json.ignore_merges);
  if (!bpe.ok()) return Annotate(bpe.status(), absl::StrCat(path, ": model"));
  for (int byte = 0; json.handles_unknown && byte < 256; ++byte) {
    const bool in_utf8 = byte < 0xC0 || (byte >= 0xC2 && byte <= 0xF4);
    if (in_utf8 && bpe->byte_id(static_cast<uint8_t>(byte)) < 0) {
      return absl::UnimplementedError(
          absl::StrCat(path,
                       ": model.unk_token or byte_fallback with a vocabulary that has no "
                       "token for byte 0x",
                       absl::Hex(byte, absl::kZeroPad2), " is not supported"));
    }
  }
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
  return absl::InvalidArgumentError(absl::StrCat(path, ": has no token \"", *config.bos_token,
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
  ASSIGN_OR_RETURN(std::vector<Token> table, MakeTable(path, json, added));
  ASSIGN_OR_RETURN(BpeModel bpe, MakeBpe(path, json));
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
    if (token.normalized && json.nfc) {
      ASSIGN_OR_RETURN(token.content, NormalizeNfc(token.content));
    }
    (token.normalized ? normalized : raw).push_back(std::move(token));
  }
  return std::make_unique<BpeTokenizer>(std::move(table), AddedTokenMatcher(std::move(raw)),
                                        AddedTokenMatcher(std::move(normalized)), json.nfc,
                                        *std::move(pretokenizer), std::move(bpe), bos,
                                        Sha256Hex(absl::StrCat(bytes, changes)));
}

}  // namespace carrel::model
