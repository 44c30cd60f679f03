#include "model/special_tokens.h"

#include <algorithm>
#include <filesystem>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "common/file.h"
#include "common/json.h"
#include "common/status.h"
#include "model/gguf.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;

// Ends of texts, turns and messages as families write them, and what follows a filled-in middle: another
// file, or another repository.
constexpr absl::string_view kEndTexts =
    "<|endoftext|> <|im_end|> <|eot_id|> <|eom_id|> <|end_of_text|> <end_of_turn> "
    "<|end_of_turn|> <|end|> <|return|> <|call|> </s> <eos> <|eos|> <EOT> <｜end▁of▁sentence｜> "
    "<|fim_pad|> <fim_pad> <fim-pad> <|repo_name|> <reponame> <repo_name> <|file_sep|> "
    "<file_sep> <|file_separator|>";

bool IsWrittenAsControl(absl::string_view text) {
  return (absl::StartsWith(text, "<|") && absl::EndsWith(text, "|>")) ||
         (absl::StartsWith(text, "<｜") && absl::EndsWith(text, "｜>"));
}

// The one token that this text is; nothing where it is none, or several.
std::optional<TokenId> TokenOf(const Tokenizer& tokenizer, absl::string_view text) {
  const auto ids = tokenizer.Encode(text);
  if (!ids.ok() || ids->size() != 1) return std::nullopt;
  const auto back = tokenizer.Decode(*ids, /*skip_special=*/false);
  if (!back.ok() || *back != text) return std::nullopt;
  return ids->front();
}

bool IsControl(const Tokenizer& tokenizer, TokenId id, absl::string_view text) {
  const auto visible = tokenizer.Decode({id}, /*skip_special=*/true);
  return IsWrittenAsControl(text) || (visible.ok() && visible->empty());
}

std::string TextOf(const Tokenizer& tokenizer, TokenId id) {
  if (id < 0) return "";
  return tokenizer.Decode({id}, /*skip_special=*/false).value_or("");
}

// A special token is a text, or an object with its content; null is none.
absl::Status ReadText(const JsonFields& fields, const char* name, std::string& text) {
  if (fields.IsNull(name)) text.clear();
  const json* value = fields.Find(name);
  if (value == nullptr) return absl::OkStatus();
  if (value->is_object()) {
    const JsonFields token(absl::StrCat(fields.where(), ": ", name), *value);
    ASSIGN_OR_RETURN(text, token.String("content"));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(text, fields.String(name));
  return absl::OkStatus();
}

absl::Status ReadTokenizerConfig(const std::string& model_dir, SpecialTexts& texts) {
  const std::string path = (std::filesystem::path(model_dir) / "tokenizer_config.json").string();
  const absl::StatusOr<std::string> bytes = ReadFile(path);
  if (absl::IsNotFound(bytes.status())) return absl::OkStatus();
  RETURN_IF_ERROR(bytes.status());
  ASSIGN_OR_RETURN(const json object, ParseJsonObject(*bytes, path));
  const JsonFields fields(path, object);
  RETURN_IF_ERROR(ReadText(fields, "bos_token", texts.bos));
  return ReadText(fields, "eos_token", texts.eos);
}

}  // namespace

absl::StatusOr<SpecialTexts> ResolveSpecialTokens(const std::string& model_dir,
                                                  const Tokenizer& tokenizer, ModelConfig& config) {
  std::vector<TokenId>& ends = config.eos_token_ids;
  SpecialTexts texts;
  texts.eos = TextOf(tokenizer, ends.empty() ? -1 : ends.front());
  if (IsGgufPath(model_dir)) {
    texts.bos = TextOf(tokenizer, config.bos_token_id);
  } else {
    texts.bos = TextOf(tokenizer, tokenizer.bos_token_id());
    RETURN_IF_ERROR(ReadTokenizerConfig(model_dir, texts));
  }
  const auto add = [&](std::optional<TokenId> id) {
    if (!id || *id >= config.vocab_size) return;
    if (std::find(ends.begin(), ends.end(), *id) == ends.end()) ends.push_back(*id);
  };
  const auto add_control = [&](std::optional<TokenId> id, absl::string_view text) {
    if (id && IsControl(tokenizer, *id, text)) add(id);
  };
  if (!texts.eos.empty()) add(TokenOf(tokenizer, texts.eos));
  for (const TokenId id : config.overruled_eos_ids) add_control(id, TextOf(tokenizer, id));
  for (const absl::string_view text : absl::StrSplit(kEndTexts, ' ')) {
    add_control(TokenOf(tokenizer, text), text);
  }
  return texts;
}

}  // namespace carrel::model
