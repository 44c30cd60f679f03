// What:   SST files that no store has taken in yet, read as a store would read them once it has.
// Errors: DataLoss a file that is not as SstWriter wrote it (names it); as StoredContext.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {

// manifest: of an unbound context: nothing vouches for segments but what they are themselves. The
// files (of SstWriter, with disjoint ranges) may be deleted or moved meanwhile.
absl::StatusOr<std::shared_ptr<const StoredContext>> OpenStagedContext(
    const v1::Manifest& manifest, absl::Span<const std::string> sst_files);

}  // namespace carrel::kvstore
