#include "kvstore/storage/staged_context.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "carrel/v1/context.pb.h"
#include "common/mapped_file.h"
#include "common/status.h"
#include "kvstore/storage/rocks.h"
#include "kvstore/storage/segment_file.h"
#include "kvstore/storage/sst_blocks.h"
#include "kvstore/storage/stored_context.h"
#include "rocksdb/sst_file_reader.h"

namespace carrel::kvstore {
namespace {

absl::StatusOr<std::shared_ptr<const SegmentFile>> OpenStagedFile(const std::string& path) {
  ASSIGN_OR_RETURN(const std::unique_ptr<MappedFile> file, MappedFile::Open(path));
  rocksdb::SstFileReader reader(SegmentOptions());
  RETURN_IF_ERROR(FromRocks(reader.Open(path), path));
  const SstEntries found = WalkToOffset(file->bytes(), reader.GetTableProperties()->data_size);
  RETURN_IF_ERROR(Annotate(found.status, path));
  return SegmentFile::Open(path, std::string(found.first_key), std::string(found.last_key),
                           file->bytes().size());
}

}  // namespace

absl::StatusOr<std::shared_ptr<const StoredContext>> OpenStagedContext(
    const v1::Manifest& manifest, absl::Span<const std::string> sst_files) {
  ASSIGN_OR_RETURN(const ContextId id, ContextIdOf(manifest));
  std::vector<std::shared_ptr<const SegmentFile>> files;
  for (const std::string& path : sst_files) {
    ASSIGN_OR_RETURN(auto file, OpenStagedFile(path));
    files.push_back(std::move(file));
  }
  std::sort(files.begin(), files.end(),
            [](const auto& a, const auto& b) { return a->first_key() < b->first_key(); });
  v1::Manifest unbound = manifest;
  unbound.clear_content_id();
  return MakeStoredContext(id, std::move(unbound), std::move(files));
}

}  // namespace carrel::kvstore
