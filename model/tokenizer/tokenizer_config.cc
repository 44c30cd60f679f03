// tokenizer_config.json and added_tokens.json; see tokenizer_files.h.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/json.h"
#include "common/status.h"
#include "model/tokenizer/tokenizer_fields.h"
#include "model/tokenizer/tokenizer_files.h"

namespace carrel::model {
namespace {

// An absent file is nullptr.
absl::StatusOr<std::optional<Json>> ReadOptionalJson(const std::string& path) {
  const absl::StatusOr<std::string> bytes = ReadFile(path);
  if (absl::IsNotFound(bytes.status())) return std::nullopt;
  RETURN_IF_ERROR(bytes.status());
  ASSIGN_OR_RETURN(Json document, ParseJsonObject(*bytes, path));
  return std::optional<Json>(std::move(document));
}

// A special token is written as a string or as an object with content.
absl::StatusOr<std::string> SpecialTokenContent(const Json& value, absl::string_view where) {
  if (value.is_string()) return value.get_ref<const std::string&>();
  return StringField(value, "content", where);
}

// Contents of bos_token, eos_token, ... and additional_special_tokens.
absl::flat_hash_set<std::string> SpecialContents(const Json& config) {
  absl::flat_hash_set<std::string> contents;
  for (const auto& [key, value] : config.items()) {
    if (key == "additional_special_tokens" && value.is_array()) {
      for (const Json& token : value) {
        const auto content = SpecialTokenContent(token, key);
        if (content.ok()) contents.insert(*content);
      }
    } else if (absl::EndsWith(key, "_token") && (value.is_string() || value.is_object())) {
      const auto content = SpecialTokenContent(value, key);
      if (content.ok()) contents.insert(*content);
    }
  }
  return contents;
}

absl::Status ReadAddedTokensDecoder(const std::string& path, const Json& config,
                                    std::vector<AddedToken>* tokens) {
  const Json* decoder = FindField(config, "added_tokens_decoder");
  if (decoder == nullptr) return absl::OkStatus();
  if (!decoder->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": added_tokens_decoder is not an object"));
  }
  for (const auto& [key, object] : decoder->items()) {
    const std::string where =
        absl::StrCat(path, ": added_tokens_decoder[", ShownJson(Json(key)), "]");
    int64_t id = -1;
    if (!absl::SimpleAtoi(key, &id)) id = -1;
    ASSIGN_OR_RETURN(AddedToken token, ParseAddedToken(object, where));
    ASSIGN_OR_RETURN(token.id, ParseTokenId(Json(id), where));
    tokens->push_back(std::move(token));
  }
  std::sort(tokens->begin(), tokens->end(),
            [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
  return absl::OkStatus();
}

absl::Status ReadAddedTokensJson(const std::string& path, const Json& document,
                                 const absl::flat_hash_set<std::string>& specials,
                                 TokenizerConfig* result) {
  absl::flat_hash_set<TokenId> known;
  for (const AddedToken& token : result->added_tokens) known.insert(token.id);
  for (const auto& [content, value] : document.items()) {
    AddedToken token;
    token.content = content;
    token.special = specials.contains(content);
    ASSIGN_OR_RETURN(token.id,
                     ParseTokenId(value, absl::StrCat(path, ": ", ShownJson(Json(content)))));
    if (!known.contains(token.id)) result->more_added_tokens.push_back(std::move(token));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizerConfig> ReadTokenizerConfig(const std::string& model_dir) {
  TokenizerConfig result;
  absl::flat_hash_set<std::string> specials;
  const std::string path = absl::StrCat(model_dir, "/tokenizer_config.json");
  ASSIGN_OR_RETURN(const std::optional<Json> config, ReadOptionalJson(path));
  if (config.has_value()) {
    result.present = true;
    result.has_bos = config->contains("bos_token");
    if (const Json* bos = FindField(*config, "bos_token"); bos != nullptr) {
      ASSIGN_OR_RETURN(result.bos_token,
                       SpecialTokenContent(*bos, absl::StrCat(path, ": bos_token")));
    }
    if (FindField(*config, "add_bos_token") != nullptr) {
      ASSIGN_OR_RETURN(result.add_bos_token, BoolField(*config, "add_bos_token", {}, path));
    }
    specials = SpecialContents(*config);
    RETURN_IF_ERROR(ReadAddedTokensDecoder(path, *config, &result.added_tokens));
  }
  const std::string added_path = absl::StrCat(model_dir, "/added_tokens.json");
  ASSIGN_OR_RETURN(const std::optional<Json> added, ReadOptionalJson(added_path));
  if (added.has_value()) {
    RETURN_IF_ERROR(ReadAddedTokensJson(added_path, *added, specials, &result));
  }
  return result;
}

}  // namespace carrel::model
