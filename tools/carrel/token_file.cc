#include "tools/carrel/token_file.h"

#include <cstdint>
#include <nlohmann/json.hpp>

#include "common/file.h"
#include "common/json.h"
#include "common/shown.h"
#include "common/status.h"

namespace carrel::tools {

absl::StatusOr<std::vector<TokenId>> ReadTokenFile(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  ASSIGN_OR_RETURN(const nlohmann::json json, ParseJson(text, path));
  if (!json.is_array())
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a JSON array of token ids"));
  std::vector<TokenId> ids;
  ids.reserve(json.size());
  for (const nlohmann::json& value : json) {
    const bool fits = value.is_number_unsigned()
                          ? value.get<uint64_t>() <= INT32_MAX
                          : value.is_number_integer() && value.get<int64_t>() >= INT32_MIN;
    if (!fits) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": entry ", ids.size(), " is not a token id: ", ShownJson(value)));
    }
    ids.push_back(value.get<TokenId>());
  }
  return ids;
}

}  // namespace carrel::tools
