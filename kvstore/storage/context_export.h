// What:   the export of a context from its mapped files.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvstore/storage/context_stream.h"
#include "kvstore/storage/segment_file.h"

namespace carrel::kvstore {

// manifest: as it is stored. files: of `context`, ordered by key.
std::unique_ptr<ContextExport> MakeContextExport(
    std::shared_ptr<const StoredContext> context, const std::string& manifest,
    std::vector<std::shared_ptr<const SegmentFile>> files);

}  // namespace carrel::kvstore
