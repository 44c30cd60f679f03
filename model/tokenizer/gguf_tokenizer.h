// What:   the tokenizer that a GGUF file's metadata describe.
// Source: the keys tokenizer.ggml.*. Model gpt2: byte-level BPE, cut by the pre-tokenizer that
//         tokenizer.ggml.pre names, with the pattern (and, for qwen2, the NFC normalizer) of the
//         Hugging Face tokenizers that the name stands for. Model llama: SentencePiece BPE, by
//         scores. Tokens of type control are special added tokens, user-defined ones are added
//         tokens.
// Edge:   documents begin with BOS if add_bos_token says so; if it is absent: model llama, and the
//         pre-tokenizers llama-bpe and tekken. add_eos_token changes nothing: a question follows.
// Errors: InvalidArgument a key that is missing, of another type or length, or contradicts itself;
//         Unimplemented, naming it, a tokenizer model or pre-tokenizer that we do not run; NotFound
//         a file without a tokenizer.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "model/gguf.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::model {

absl::StatusOr<std::unique_ptr<Tokenizer>> GgufTokenizer(const Gguf& gguf);

}  // namespace carrel::model
