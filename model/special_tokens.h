// What:   the tokens that end an answer, and the texts of BOS and EOS that chat templates see: the same for a
//         folder and a GGUF file of one model.
// Ends:   what ModelConfig has (generation_config.json, else config.json; the eos, eot and eom ids of GGUF);
//         eos_token of tokenizer_config.json; and where the tokenizer has them as control tokens (special, or
//         written <|like this|>, which converters take for the same) the ids of config.json that
//         generation_config.json overrules, and tokens by their text, as kEndTexts lists them. A text that
//         is an ordinary token, such as an HTML tag's </s>, ends nothing.
// Texts:  bos_token and eos_token of tokenizer_config.json, null being none; where it does not say, and of a
//         GGUF file, what the ids stand for.
// Errors: those of reading tokenizer_config.json; InvalidArgument a bos_token or eos_token that is no text.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "model/config.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::model {

struct SpecialTexts {
  std::string bos, eos;  // empty: none
};

// Adds to config.eos_token_ids, behind those that are there.
absl::StatusOr<SpecialTexts> ResolveSpecialTokens(const std::string& model_dir,
                                                  const Tokenizer& tokenizer, ModelConfig& config);

}  // namespace carrel::model
