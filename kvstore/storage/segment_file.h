// What:   one SST file of a context, mapped; finds the values in it.
// Invariants
//   1. Mapped from creation on: the bytes stay readable after the file is deleted.
//   2. Blocks are located at the first Find (one or two pages per value), not before.
// Threads: any.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/call_once.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"
#include "common/mapped_file.h"
#include "kvstore/storage/rocks.h"
#include "kvstore/storage/sst_blocks.h"

namespace carrel::kvstore {

class SegmentFile {
 public:
  // first_key, last_key and bytes as RocksDB recorded them at ingestion.
  static absl::StatusOr<std::shared_ptr<const SegmentFile>> Open(const std::string& path,
                                                                 std::string first_key,
                                                                 std::string last_key,
                                                                 uint64_t bytes);

  const std::string& first_key() const { return first_key_; }
  const std::string& last_key() const { return last_key_; }
  void ReleasePages() const { file_->ReleasePages(); }

  // nullopt: the file was written without the key. DataLoss: it is not as it was written, at the
  // key or before it.
  absl::StatusOr<std::optional<absl::string_view>> Find(absl::string_view key) const;

 private:
  SegmentFile() = default;
  void Locate() const;
  std::string path_, first_key_, last_key_;
  std::unique_ptr<MappedFile> file_;
  mutable absl::once_flag located_;
  mutable SstEntries entries_;  // set by Locate
};

// All files of a context, ordered by key.
absl::StatusOr<std::vector<std::shared_ptr<const SegmentFile>>> OpenSegmentFiles(const OpenDb& db,
                                                                                 ContextId id);

}  // namespace carrel::kvstore
