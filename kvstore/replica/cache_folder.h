// What:   the folder that a replica keeps contexts of a bucket in, marked as such: what lies there may be removed at
//         any time, and only there.
// Bytes:  FOLDER/replica-of: the bucket's URI, and a line break.
// Errors: FailedPrecondition the folder is of another bucket (names both), or holds contexts that no bucket vouches
//         for; those of the file system.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace carrel::kvstore {

class Store;

// store: open in the folder.
absl::Status ClaimCacheFolder(const std::string& folder, const std::string& uri,
                              const Store& store);

}  // namespace carrel::kvstore
