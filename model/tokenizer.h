// What:      text to token ids and back, as the checkpoint's own tokenizer does it.
// Source:    tokenizer.json (Hugging Face tokenizers: byte-level BPE) or tokenizer.model
// (SentencePiece). tokenizer.json is used if it is byte-level,
//            else tokenizer.model if there is one; anything else is refused by name.
// Errors:    InvalidArgument invalid UTF-8 in the text (names the byte offset), a malformed
// tokenizer file; Unimplemented a component that we do not run. Threads:   immutable once loaded;
// every method may be called concurrently.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/ids.h"

namespace carrel::model {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // No BOS or EOS is added. Special and added tokens written out in the text are recognised.
  virtual absl::StatusOr<std::vector<TokenId>> Encode(absl::string_view text) const = 0;

  // The bytes of the whole sequence, byte-exact; special tokens are left out if skip_special. An id
  // outside the vocabulary is InvalidArgument.
  virtual absl::StatusOr<std::string> Decode(absl::Span<const TokenId> ids,
                                             bool skip_special) const = 0;

  // One more than the largest id.
  virtual int64_t vocab_size() const = 0;

  // The token that documents start with, or -1: tokenizer_config.json's bos_token unless
  // add_bos_token is false; SentencePiece's own without that file.
  TokenId bos_token_id() const { return bos_token_id_; }

  // SHA-256 of the tokenizer file(s) that decide the ids.
  const std::string& sha256() const { return sha256_; }

 protected:
  TokenId bos_token_id_ = -1;
  std::string sha256_;
};

// NotFound if the folder has neither file.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& model_dir);

// Decodes a growing sequence and hands out text as soon as it cannot change: never half a UTF-8
// character, and the concatenation of everything handed out (Push..., Finish) is Decode(all ids).
// Bytes that are invalid UTF-8 for good are handed out as they are. Threads: one thread at a time.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer* tokenizer, bool skip_special = true)
      : tokenizer_(tokenizer), skip_special_(skip_special) {}
  absl::StatusOr<std::string> Push(TokenId id);
  absl::StatusOr<std::string> Finish();

 private:
  const Tokenizer* tokenizer_;
  const bool skip_special_;
  std::vector<TokenId>
      ids_;  // since the last point from which decoding is independent of what came before
  std::string decoded_;  // their text so far
  size_t emitted_ = 0;   // bytes of decoded_ handed out
};

}  // namespace carrel::model
