// What:   one SST file of a context, mapped; finds the values in it.
// Invariants
//   1. Mapped from creation on: the bytes stay readable after the file is deleted.
//   2. Blocks are located at the first Find (one or two pages per value), not before.
//      After a change of the file (Look) they are located anew.
//   3. Under kSparse, what is known ahead is asked for (AskAhead), until Load reads the rest.
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "common/mapped_file.h"
#include "kvstore/storage/file_watch.h"
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
  int64_t bytes() const { return static_cast<int64_t>(file_->bytes().size()); }
  absl::string_view contents() const { return file_->bytes(); }  // unverified
  // Every segment in it. DataLoss: it is not as it was written.
  absl::StatusOr<std::shared_ptr<const SstEntries>> Entries() const;

  // From now on; kLargePages before.
  void Expect(FileAccess access) const;
  // Pages come one by one: it pays to ask for them ahead.
  bool sparse() const { return sparse_.load(std::memory_order_relaxed); }
  void AskAhead(absl::string_view part) const;  // of the file's bytes
  int64_t bytes_asked() const { return bytes_asked_.load(std::memory_order_relaxed); }
  // Reads all of it into large pages; not sparse any more. What was read before may be read anew.
  void Load(const std::atomic<bool>& cancelled) const;
  // As FileWatch::Look; what is known of where values lie is forgotten, too.
  absl::StatusOr<int64_t> Look(absl::FunctionRef<void()> forget) const;
  int64_t changes() const { return watch_->changes(); }
  void Distrust(absl::FunctionRef<void()> forget) const;

  const MappedFile& mapped() const { return *file_; }

  // Sparse again, if that is what was expected.
  void ReleasePages() const;

  // nullopt: the file was written without the key. DataLoss: it is not as it was written, at the
  // key or before it.
  absl::StatusOr<std::optional<absl::string_view>> Find(absl::string_view key) const;

 private:
  SegmentFile() = default;
  std::shared_ptr<const SstEntries> Located() const;
  void ForgetPlaces() const;
  void Apply(FileAccess access) const;
  std::string path_, first_key_, last_key_;
  std::unique_ptr<MappedFile> file_;
  std::unique_ptr<FileWatch> watch_;
  mutable absl::Mutex mu_;
  mutable std::shared_ptr<const SstEntries> entries_ ABSL_GUARDED_BY(mu_);  // null: not located
  mutable std::atomic<bool> expected_sparse_{false};
  mutable std::atomic<bool> sparse_{false};
  mutable std::atomic<bool> is_located_{false};
  mutable std::atomic<int64_t> bytes_asked_{0};
};

// All files of a context, ordered by key.
absl::StatusOr<std::vector<std::shared_ptr<const SegmentFile>>> OpenSegmentFiles(const OpenDb& db,
                                                                                 ContextId id);
// Of a context that is deleted: where nobody else has them open, memory and disk get their pages back here.
void CloseTogether(std::vector<std::shared_ptr<const SegmentFile>> files);
// Takes everybody's right to write from them: against accidents, so that a file system that knows no
// such rights is no error.
void MakeReadOnly(const OpenDb& db, ContextId id);

}  // namespace carrel::kvstore
