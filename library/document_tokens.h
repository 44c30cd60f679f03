// What:   the token ids of the document that a stored context was made of.
// Errors: DataLoss they are not those of the manifest's digest.
// Cost:   4 bytes per token, read and hashed.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"

namespace carrel::kvstore {
class StoredContext;
}

namespace carrel::library {

absl::StatusOr<std::vector<TokenId>> ReadDocumentTokens(const kvstore::StoredContext& context);

}  // namespace carrel::library
