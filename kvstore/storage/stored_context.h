// What:   segments of one context, read from its mapped files.
#pragma once

#include <memory>
#include <vector>

#include "carrel/v1/context.pb.h"
#include "kvstore/storage/segment_file.h"

namespace carrel::kvstore {

// files: ordered by key.
std::shared_ptr<const StoredContext> MakeStoredContext(
    v1::Manifest manifest, std::vector<std::shared_ptr<const SegmentFile>> files);

}  // namespace carrel::kvstore
