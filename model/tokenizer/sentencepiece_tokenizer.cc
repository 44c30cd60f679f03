#include "model/tokenizer/sentencepiece_tokenizer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/checksum.h"
#include "common/shown.h"
#include "common/status.h"
#include "model/tokenizer/byte_alphabet.h"
#include "model/tokenizer/sentencepiece_library.h"
#include "model/tokenizer/sentencepiece_spec.h"
#include "model/tokenizer/utf8.h"

namespace carrel::model {
namespace {

struct Piece {
  std::string text;  // what it adds to a text that has begun
  bool used = false;
  bool special = false;
  bool leading_space = false;  // text begins with a space symbol's space
};

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(std::unique_ptr<SentencePieceLibrary> library, std::vector<Piece> pieces,
                         AddedTokenMatcher added, const SentencePieceSpec& spec, TokenId bos,
                         std::string sha256)
      : library_(std::move(library)),
        pieces_(std::move(pieces)),
        added_(std::move(added)),
        spec_(spec) {
    bos_token_id_ = bos;
    sha256_ = std::move(sha256);
  }

  // SentencePiece has a token for everything.
  absl::StatusOr<std::vector<TokenId>> EncodeText(
      absl::string_view text, Dropped*, absl::Span<const PlainRange> plain) const override {
    RETURN_IF_ERROR(ValidateUtf8(text));
    std::vector<TextSpan> spans;
    added_.Split(text, &spans, plain);
    std::vector<TokenId> ids;
    std::vector<int> part;
    std::string error;
    for (const TextSpan& span : spans) {
      if (span.id >= 0) {
        ids.push_back(span.id);
        continue;
      }
      if (!library_->Encode({span.text.data(), span.text.size()}, &part, &error)) {
        return absl::InternalError(absl::StrCat("SentencePiece: ", error));
      }
      ids.insert(ids.end(), part.begin(), part.end());
    }
    return ids;
  }

  // The library drops the space of the first piece if encoding puts one there, and those of all
  // pieces before the first visible character if encoding removes surplus white space.
  absl::Status DecodeNext(TokenId id, bool skip_special, DecodeState* state,
                          std::string* text) const override {
    if (id < 0 || id >= vocab_size() || !pieces_[static_cast<size_t>(id)].used) {
      return absl::InvalidArgumentError(absl::StrCat(
          "decode: token id ", id, " is not in the vocabulary (vocab_size ", vocab_size(), ")"));
    }
    const Piece& piece = pieces_[static_cast<size_t>(id)];
    if (skip_special && piece.special) return absl::OkStatus();
    absl::string_view visible = piece.text;
    const bool drops = spec_.add_dummy_prefix || spec_.remove_extra_whitespaces;
    if (state->at_start && piece.leading_space && drops) {
      visible.remove_prefix(1);
      if (!spec_.remove_extra_whitespaces) state->at_start = false;
    }
    text->append(visible.data(), visible.size());
    if (!visible.empty()) state->at_start = false;
    return absl::OkStatus();
  }

  int64_t vocab_size() const override { return static_cast<int64_t>(pieces_.size()); }

  void DropTokensFrom(int64_t vocab_size) override {
    if (library_->size() > vocab_size || bos_token_id() >= vocab_size) return;
    if (vocab_size < this->vocab_size()) pieces_.resize(static_cast<size_t>(vocab_size));
    added_.DropFrom(vocab_size);
  }

 private:
  const std::unique_ptr<const SentencePieceLibrary> library_;
  std::vector<Piece> pieces_;  // by id
  AddedTokenMatcher added_;
  const SentencePieceSpec spec_;
};

// The byte of a piece like <0x0A>.
char ByteOf(absl::string_view piece) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10; };
  return static_cast<char>(digit(piece[3]) * 16 + digit(piece[4]));
}

std::vector<Piece> MakePieces(const SentencePieceLibrary& library, const SentencePieceSpec& spec) {
  using Kind = SentencePieceLibrary::PieceKind;
  std::vector<Piece> pieces(static_cast<size_t>(library.size()));
  for (size_t i = 0; i < pieces.size(); ++i) {
    const std::string& name = library.name(static_cast<int>(i));
    const Kind kind = library.kind(static_cast<int>(i));
    Piece& piece = pieces[i];
    piece.used = true;
    if (kind == Kind::kControl) {
      piece.text = name;
      piece.special = true;
    } else if (kind == Kind::kUnknown) {
      piece.text = spec.unknown_surface;
    } else if (kind == Kind::kByte && name.size() == 6) {
      piece.text = std::string(1, ByteOf(name));
    } else {
      piece.leading_space = absl::StartsWith(name, kSpaceSymbol);
      piece.text = absl::StrReplaceAll(name, {{kSpaceSymbol, " "}});
    }
  }
  return pieces;
}

absl::Status PutAddedTokens(const std::string& path, const SentencePieceLibrary& library,
                            const std::vector<AddedToken>& added, std::vector<Piece>* pieces) {
  const size_t model_size = pieces->size();
  for (const AddedToken& token : added) {
    const size_t id = static_cast<size_t>(token.id);
    if (id < model_size) {
      const std::string& name = library.name(token.id);
      if (name != token.content) {
        return absl::InvalidArgumentError(absl::StrCat(path, ": id ", token.id, " is the piece \"",
                                                       Shown(name), "\", not the added token \"",
                                                       Shown(token.content), "\""));
      }
      // The model's own piece keeps its meaning for decoding.
      (*pieces)[id].special |= token.special;
      continue;
    }
    if (id >= pieces->size()) pieces->resize(id + 1);
    (*pieces)[id] = {token.content, true, token.special, false};
  }
  return absl::OkStatus();
}

absl::StatusOr<TokenId> FindBos(const std::string& path, const TokenizerConfig& config,
                                const SentencePieceLibrary& library,
                                const std::vector<AddedToken>& added) {
  if (!config.add_bos_token.value_or(true)) return -1;
  if (!config.has_bos) return library.bos_id();
  if (!config.bos_token.has_value()) return -1;
  for (const AddedToken& token : added) {
    if (token.content == *config.bos_token) return token.id;
  }
  const int id = library.FindPiece(*config.bos_token);
  if (id >= 0) return id;
  return absl::InvalidArgumentError(absl::StrCat(path, ": has no token \"",
                                                 Shown(*config.bos_token),
                                                 "\", tokenizer_config.json's bos_token"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> CreateSentencePieceTokenizer(
    const std::string& path, absl::string_view bytes, const TokenizerConfig& config) {
  absl::StatusOr<SentencePieceSpec> spec = ReadSentencePieceSpec(bytes);
  if (!spec.ok()) return Annotate(spec.status(), path);
  if (spec->has_denormalizer || spec->treat_whitespace_as_suffix) {
    return absl::UnimplementedError(absl::StrCat(
        path, ": ",
        spec->has_denormalizer ? "denormalizer_spec" : "trainer_spec.treat_whitespace_as_suffix",
        " is not supported"));
  }
  std::string error;
  std::unique_ptr<SentencePieceLibrary> library =
      SentencePieceLibrary::Load({bytes.data(), bytes.size()}, &error);
  if (library == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a SentencePiece model: ", error));
  }
  std::vector<AddedToken> added;
  std::string changes;
  RETURN_IF_ERROR(MergeAddedTokens("tokenizer_config.json beside " + path, config.added_tokens,
                                   &added, &changes));
  RETURN_IF_ERROR(MergeAddedTokens("added_tokens.json beside " + path, config.more_added_tokens,
                                   &added, &changes));
  std::vector<Piece> pieces = MakePieces(*library, *spec);
  RETURN_IF_ERROR(PutAddedTokens(path, *library, added, &pieces));
  ASSIGN_OR_RETURN(const TokenId bos, FindBos(path, config, *library, added));
  return std::make_unique<SentencePieceTokenizer>(std::move(library), std::move(pieces),
                                                  AddedTokenMatcher(std::move(added)), *spec, bos,
                                                  Sha256Hex(absl::StrCat(bytes, changes)));
}

}  // namespace carrel::model
