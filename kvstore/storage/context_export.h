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

// The bytes of a file of an export that MakeContextExport made, as they are mapped, for whoever sends files
// one by one: they live as long as it. They are verified once Next has given the file's digest.
absl::string_view ExportedFile(const ContextExport& from, int64_t file);

}  // namespace carrel::kvstore
