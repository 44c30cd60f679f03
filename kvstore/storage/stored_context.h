// What:   segments of one context, read from its mapped files.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "carrel/v1/context.pb.h"
#include "kvstore/format/context_id.h"
#include "kvstore/storage/segment_file.h"

namespace carrel::kvstore {

// files: ordered by key. A manifest with a content id vouches for every segment; without one, what
// fits its key counts. DataLoss: the manifest's digests.
absl::StatusOr<std::shared_ptr<const StoredContext>> MakeStoredContext(
    ContextId id, v1::Manifest manifest, std::vector<std::shared_ptr<const SegmentFile>> files);

}  // namespace carrel::kvstore
