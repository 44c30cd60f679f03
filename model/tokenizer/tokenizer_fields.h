// What:   checked access to a JSON document: nothing here throws or aborts on what a file holds.
// Errors: InvalidArgument naming the file (or `where`) and the field.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/tokenizer/added_tokens.h"

namespace carrel::model {

using Json = nlohmann::json;

// object[key], or nullptr if it is absent or null.
const Json* FindField(const Json& object, const char* key);

absl::StatusOr<bool> BoolField(const Json& object, const char* key, std::optional<bool> fallback,
                               absl::string_view where);
absl::StatusOr<std::string> StringField(const Json& object, const char* key,
                                        absl::string_view where);

// An id: a whole number in [0, kMaxTokenId].
absl::StatusOr<TokenId> ParseTokenId(const Json& value, absl::string_view where);

// An object with content and flags; `id` stays -1.
absl::StatusOr<AddedToken> ParseAddedToken(const Json& object, absl::string_view where);

// The value for a message, cut short.
std::string ShortJson(const Json& value);

}  // namespace carrel::model
