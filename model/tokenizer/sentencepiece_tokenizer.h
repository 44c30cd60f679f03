// What:   the tokenizer of a SentencePiece tokenizer.model, encoded by libsentencepiece and decoded
//         here.
// Source: Kudo and Richardson, "SentencePiece"; sentencepiece_model.proto. Decoding differs from
//         the library's in one thing: byte pieces that do not form a character give their bytes,
//         not U+FFFD. Control pieces (<s>, </s>) are special: written out unless skip_special.
// Errors: InvalidArgument a malformed model, or added tokens that contradict it; Unimplemented
//         denormalizer_spec, treat_whitespace_as_suffix.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/tokenizer_files.h"

namespace carrel::model {

// `bytes` are those of the file `path`.
absl::StatusOr<std::unique_ptr<Tokenizer>> CreateSentencePieceTokenizer(
    const std::string& path, absl::string_view bytes, const TokenizerConfig& config);

}  // namespace carrel::model
