// What:   tokenizer.json and tokenizer_config.json reduced to plain structs.
// Source: the serialisation of Hugging Face tokenizers 0.13 to 0.22, old and new spellings.
//         Truncation and padding are not ours to do and are read over; of post-processing counts
//         the one token that it puts before a text.
// Errors: InvalidArgument, naming file and field, what is malformed; Unimplemented, naming
//         component and value, what is well-formed but not run here.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/tokenizer/added_tokens.h"
#include "model/tokenizer/normalizer.h"
#include "model/tokenizer/pretokenizer.h"

namespace carrel::model {

// Ids index tables, so they are bounded: far above every vocabulary, far below memory.
inline constexpr TokenId kMaxTokenId = (1 << 24) - 1;

struct TokenizerJson {
  // Why this is not the kind that is asked for; if not empty, nothing else is filled in.
  std::string other_kind;

  // Of SentencePiece's kind: tokens are spelled in their own characters, spaces as U+2581, and what has no
  // token as bytes (<0x0A>). Else byte-level: spelled in the byte alphabet.
  bool characters = false;
  bool drops_first_space = false;  // of what is decoded

  std::vector<std::pair<std::string, TokenId>> vocab;       // ids differ, 0 <= id <= kMaxTokenId
  std::vector<std::pair<std::string, std::string>> merges;  // as spelled, by rank
  bool ignore_merges = false;
  // They act only where a byte has no token.
  std::optional<std::string> unk_token;
  bool fuse_unk = false;
  bool byte_fallback = false;
  std::vector<NormalizerStep> normalizer;
  std::vector<PretokenStep> pretokenizer;
  std::vector<AddedToken> added_tokens;  // ids and contents differ
  TokenId template_bos = -1;             // what post_processor puts before a text; -1: nothing
};

// `path` is for messages. characters: which kind is asked for.
absl::StatusOr<TokenizerJson> ParseTokenizerJson(const std::string& path, absl::string_view bytes,
                                                 bool characters = false);

struct TokenizerConfig {
  bool present = false;  // the file exists
  bool has_bos = false;  // the key bos_token exists, be it null
  std::optional<std::string> bos_token;
  std::optional<bool> add_bos_token;
  std::vector<AddedToken> added_tokens;  // added_tokens_decoder, by id
  // added_tokens.json, for ids that added_tokens_decoder does not have; special if one of the
  // special tokens that tokenizer_config.json names.
  std::vector<AddedToken> more_added_tokens;
};

// A folder with neither file gives the defaults.
absl::StatusOr<TokenizerConfig> ReadTokenizerConfig(const std::string& model_dir);

}  // namespace carrel::model
