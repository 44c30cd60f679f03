// What:   a context's segments once more, under another id, in files of this format: what
//         Store::Upgrade publishes.
// Errors: DataLoss a segment, or one that is missing: what the manifest says of rows, sizes and
//         token ids must be there, for whoever binds a context vouches for it. ResourceExhausted
//         disk full.
// Cost:   reads and writes every byte once; holds one segment twice.
#pragma once

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {

// Into `folder`, which exists: a file for what belongs to the whole context, and one per layer.
// Returns their paths. progress: told the share that is done.
absl::StatusOr<std::vector<std::string>> CopyContext(const StoredContext& from, ContextId to,
                                                     const std::string& folder,
                                                     absl::FunctionRef<void(double)> progress);

}  // namespace carrel::kvstore
