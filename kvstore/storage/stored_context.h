// What:   segments of one context, read from its mapped files, and the export of it from them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "carrel/v1/context.pb.h"
#include "kvstore/format/context_id.h"

namespace carrel::kvstore {

class ContextExport;
class SegmentFile;
class StoredContext;

// files: ordered by key. A manifest with a content id vouches for every segment; without one, what
// fits its key counts. DataLoss: the manifest's digests.
absl::StatusOr<std::shared_ptr<const StoredContext>> MakeStoredContext(
    ContextId id, v1::Manifest manifest, std::vector<std::shared_ptr<const SegmentFile>> files);

// manifest: as it is stored. files: of `context`, ordered by key.
std::unique_ptr<ContextExport> MakeContextExport(
    std::shared_ptr<const StoredContext> context, const std::string& manifest,
    std::vector<std::shared_ptr<const SegmentFile>> files);

// SST files that no store has taken in yet, read as a store would read them once it has. manifest: of an
// unbound context: nothing vouches for segments but what they are themselves. The files (of SstWriter, with
// disjoint ranges) may be deleted or moved meanwhile. DataLoss: a file that is not as SstWriter wrote it
// (names it).
absl::StatusOr<std::shared_ptr<const StoredContext>> OpenStagedContext(
    const v1::Manifest& manifest, absl::Span<const std::string> sst_files);

// A context's segments once more, under another id, in files of this format: what Store::Upgrade publishes. Into
// `folder`, which exists: a file for what belongs to the whole context, and one per layer. Returns their paths.
// progress: told the share that is done. DataLoss: a segment, or one that is missing: what the manifest says of
// rows, sizes and token ids must be there, for whoever binds a context vouches for it. ResourceExhausted: disk
// full. Cost: reads and writes every byte once; holds one segment twice.
absl::StatusOr<std::vector<std::string>> CopyContext(const StoredContext& from, ContextId to,
                                                     const std::string& folder,
                                                     absl::FunctionRef<void(double)> progress);

}  // namespace carrel::kvstore
