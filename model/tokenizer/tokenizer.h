// What:    text to token ids and back, as the checkpoint's own tokenizer does it.
// Source:  tokenizer.json (Hugging Face tokenizers: BPE, byte-level or of SentencePiece's kind) or
//          tokenizer.model (SentencePiece: bpe, unigram). tokenizer.json is used if it is byte-level,
//          else tokenizer.model if there is one, else tokenizer.json; anything else is refused by name.
//          Added tokens: tokenizer.json's own, and added_tokens_decoder of tokenizer_config.json;
//          for SentencePiece also added_tokens.json.
// Errors:  InvalidArgument invalid UTF-8 in the text (names the byte offset), a malformed
//          tokenizer file (names it); Unimplemented a component that we do not run (names it).
// Ownership: a StreamDecoder refers to its tokenizer, which outlives it.
// Threads: immutable once loaded; every method may be called concurrently.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "model/tokenizer/plain_range.h"

namespace carrel::model {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Bytes that the vocabulary has no token for, and no unk_token or byte_fallback either.
  struct Dropped {
    int64_t bytes = 0;
    int64_t first_offset = -1;  // in the text; in its NFC where the tokenizer normalises it
    uint8_t first_byte = 0;
  };

  // No BOS or EOS is added. Special and added tokens written out in the text are recognised.
  // SentencePiece encodes the text between two added tokens as a text of its own.
  // With `dropped` (may be null), bytes without a token are left out, as Hugging Face tokenizers do,
  // and counted; without, they are InvalidArgument, which names byte and offset, or left out all the same
  // where DropMissingBytes was said.
  // plain: in order, disjoint: added tokens that touch one of these ranges are text.
  absl::StatusOr<std::vector<TokenId>> Encode(absl::string_view text, Dropped* dropped = nullptr,
                                              absl::Span<const PlainRange> plain = {}) const {
    Dropped untold;
    return EncodeText(text, dropped == nullptr && drops_missing_bytes_ ? &untold : dropped, plain);
  }
  void DropMissingBytes() { drops_missing_bytes_ = true; }  // before it is shared

  // The bytes of the whole sequence, byte-exact: tokens that are parts of a character give its
  // bytes, valid together or not. Special tokens are left out if skip_special. SentencePiece drops
  // the space that encoding put before the text. An id outside the vocabulary is InvalidArgument.
  absl::StatusOr<std::string> Decode(absl::Span<const TokenId> ids, bool skip_special) const;

  // Where a sequence stands while it is decoded token by token.
  struct DecodeState {
    bool at_start = true;  // nothing of it is visible yet
  };

  // Appends to *text what the next token adds to the sequence: Decode one token at a time. On an
  // error nothing changes.
  virtual absl::Status DecodeNext(TokenId id, bool skip_special, DecodeState* state,
                                  std::string* text) const = 0;

  // One more than the largest id. Ids below it may be unused.
  virtual int64_t vocab_size() const = 0;

  // Of a model with so many embeddings: added tokens from there on are not tokens any more, and their
  // characters are text like others (Gemma 3's <image_soft_token>). Nothing changes where that would not
  // do: the vocabulary proper, or the token that documents begin with, goes beyond. Before it is shared.
  virtual void DropTokensFrom(int64_t /*vocab_size*/) {}

  // The token that documents start with, or -1. Of tokenizer.json: tokenizer_config.json's
  // bos_token if its add_bos_token is true, none if that is false, else what post_processor (a
  // TemplateProcessing) puts before a text. Of SentencePiece: tokenizer_config.json's bos_token, or
  // where that file or field is absent the model's own, unless add_bos_token is false.
  TokenId bos_token_id() const { return bos_token_id_; }

  // SHA-256 (hexadecimal) of the file that decides the ids, tokenizer.json or tokenizer.model. If
  // the other files add or change tokens, a line "id flags content" for each of these follows the
  // file's bytes. The chat template and other fields that change no id do not count.
  const std::string& sha256() const { return sha256_; }

  // The Jinja template of chats that a GGUF file carries, as it is there; empty where there is none,
  // and of a folder. Nothing here applies it.
  const std::string& chat_template() const { return chat_template_; }
  void set_chat_template(std::string text) { chat_template_ = std::move(text); }

 protected:
  virtual absl::StatusOr<std::vector<TokenId>> EncodeText(
      absl::string_view text, Dropped* dropped, absl::Span<const PlainRange> plain) const = 0;

  TokenId bos_token_id_ = -1;
  std::string sha256_;

 private:
  std::string chat_template_;
  bool drops_missing_bytes_ = false;
};

// Of a folder, or of a GGUF file (gguf_tokenizer.h). NotFound if it has none.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& model_dir);

// Decodes a growing sequence and hands out text as soon as it cannot change: never half a UTF-8
// character, and the concatenation of everything handed out (Push..., Finish) is Decode(all ids).
// Bytes that are invalid UTF-8 for good are handed out as they are. A Push that fails changes
// nothing. After Finish a new sequence begins.
// Threads: one thread at a time.     Cost: that of the token; nothing is decoded twice.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer* tokenizer, bool skip_special = true)
      : tokenizer_(tokenizer), skip_special_(skip_special) {}
  absl::StatusOr<std::string> Push(TokenId id);
  absl::StatusOr<std::string> Finish();

 private:
  const Tokenizer* tokenizer_;
  const bool skip_special_;
  Tokenizer::DecodeState state_;
  std::string pending_;  // the beginning of a character, not yet handed out
};

}  // namespace carrel::model
