#include "model/tokenizer/tokenizer_fields.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/json.h"
#include "common/status.h"
#include "model/tokenizer/tokenizer_files.h"

namespace carrel::model {

const Json* FindField(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto field = object.find(key);
  return field == object.end() || field->is_null() ? nullptr : &*field;
}

absl::StatusOr<bool> BoolField(const Json& object, const char* key, std::optional<bool> fallback,
                               absl::string_view where) {
  const Json* field = FindField(object, key);
  if (field == nullptr && fallback.has_value()) return *fallback;
  if (field == nullptr || !field->is_boolean()) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", key, " is ",
                                                   field == nullptr ? "missing" : ShortJson(*field),
                                                   ", not true or false"));
  }
  return field->get<bool>();
}

absl::StatusOr<std::string> StringField(const Json& object, const char* key,
                                        absl::string_view where) {
  const Json* field = FindField(object, key);
  if (field == nullptr || !field->is_string()) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", key, " is ",
                                                   field == nullptr ? "missing" : ShortJson(*field),
                                                   ", not a string"));
  }
  return field->get_ref<const std::string&>();
}

absl::StatusOr<TokenId> ParseTokenId(const Json& value, absl::string_view where) {
  // Numbers beyond int64 are unsigned or floating in the document.
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<uint64_t>() <= kMaxTokenId);
  const int64_t id = fits ? value.get<int64_t>() : -1;
  if (id < 0 || id > kMaxTokenId) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, ": id ", ShortJson(value), " is not a whole number from 0 to ", kMaxTokenId));
  }
  return static_cast<TokenId>(id);
}

absl::StatusOr<AddedToken> ParseAddedToken(const Json& object, absl::string_view where) {
  AddedToken token;
  ASSIGN_OR_RETURN(token.content, StringField(object, "content", where));
  ASSIGN_OR_RETURN(token.special, BoolField(object, "special", false, where));
  ASSIGN_OR_RETURN(token.single_word, BoolField(object, "single_word", false, where));
  ASSIGN_OR_RETURN(token.lstrip, BoolField(object, "lstrip", false, where));
  ASSIGN_OR_RETURN(token.rstrip, BoolField(object, "rstrip", false, where));
  ASSIGN_OR_RETURN(token.normalized, BoolField(object, "normalized", !token.special, where));
  return token;
}

std::string ShortJson(const Json& value) { return ShownJson(value); }

}  // namespace carrel::model
