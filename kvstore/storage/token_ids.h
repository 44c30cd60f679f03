// What:   the token ids of the document that a stored context was made of, from its segments.
// Errors: DataLoss a segment is damaged, or there are fewer than the manifest's tokens.
// Cost:   4 bytes per token, read and verified; each segment is opened once.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace carrel::kvstore {

class StoredContext;

// Of tokens [begin, end), within the manifest's: little-endian int32, as its digest is of all.
absl::StatusOr<std::string> ReadTokenIds(const StoredContext& context, int64_t begin, int64_t end);

}  // namespace carrel::kvstore
