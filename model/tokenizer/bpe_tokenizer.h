// What:   the tokenizer of a tokenizer.json whose model is BPE: byte-level, or of SentencePiece's kind.
// Source: Hugging Face tokenizers: added tokens in the text as written, normalizer, normalized
//         added tokens, pre_tokenizer, BPE.
// Errors: InvalidArgument, naming file and field, what contradicts itself.
// Cost:   O(n log w) for n bytes of text in words of w bytes; a word that occurs again in one
//         Encode is looked up.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/tokenizer_files.h"

namespace carrel::model {

// `bytes` are the file's, for sha256(); json.other_kind is empty.
absl::StatusOr<std::unique_ptr<Tokenizer>> CreateBpeTokenizer(const std::string& path,
                                                              absl::string_view bytes,
                                                              const TokenizerJson& json,
                                                              const TokenizerConfig& config);

}  // namespace carrel::model
