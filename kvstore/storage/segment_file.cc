#include "kvstore/storage/segment_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "common/status.h"
#include "common/thread_pool.h"
#include "common/thrown.h"
#include "kvstore/format/keys.h"
#include "kvstore/format/segment.h"
#include "rocksdb/metadata.h"

namespace carrel::kvstore {

absl::StatusOr<std::shared_ptr<const SegmentFile>> SegmentFile::Open(const std::string& path,
                                                                     std::string first_key,
                                                                     std::string last_key,
                                                                     uint64_t bytes) {
  std::shared_ptr<SegmentFile> file(new SegmentFile());
  auto mapped = MappedFile::Open(path);
  if (absl::IsNotFound(mapped.status())) {
    return absl::DataLossError(absl::StrCat("file is missing: ", mapped.status().message()));
  }
  if (!mapped.ok()) return mapped.status();
  file->file_ = *std::move(mapped);
  if (file->file_->bytes().size() != bytes) {
    return absl::DataLossError(
        absl::StrCat(path, ": ", file->file_->bytes().size(), " bytes, published with ", bytes));
  }
  file->watch_ = std::make_unique<FileWatch>(file->file_.get());
  file->path_ = path;
  file->first_key_ = std::move(first_key);
  file->last_key_ = std::move(last_key);
  return file;
}

std::shared_ptr<const SstEntries> SegmentFile::Located() const {
  absl::MutexLock lock(&mu_);
  if (entries_ != nullptr) return entries_;
  file_->Expect(FileAccess::kSparse);
  SstEntries entries = WalkToKey(file_->bytes(), last_key_);
  is_located_.store(true);
  Apply(expected_sparse_.load() ? FileAccess::kSparse : FileAccess::kLargePages);
  const auto wanted = ContextOfKey(first_key_), found = ContextOfKey(entries.first_key);
  if (wanted.ok() && found.ok() && *found != *wanted) {
    entries = {.status = absl::DataLossError(
                   absl::StrCat("is a file of another context, #", found->ToString()))};
  } else if (!entries.entries.empty() && entries.first_key != first_key_) {
    entries = {.status = absl::DataLossError("another first key")};
  }
  entries_ = std::make_shared<const SstEntries>(std::move(entries));
  return entries_;
}

void SegmentFile::ForgetPlaces() const {
  absl::MutexLock lock(&mu_);
  entries_.reset();
}

absl::StatusOr<int64_t> SegmentFile::Look(absl::FunctionRef<void()> forget) const {
  return watch_->Look([&] {
    ForgetPlaces();
    forget();
  });
}

void SegmentFile::Distrust(absl::FunctionRef<void()> forget) const {
  watch_->Distrust([&] {
    ForgetPlaces();
    forget();
  });
}

absl::StatusOr<std::shared_ptr<const SstEntries>> SegmentFile::Entries() const {
  std::shared_ptr<const SstEntries> located = Located();
  RETURN_IF_ERROR(Annotate(located->status, path_));
  return located;
}

void SegmentFile::Expect(FileAccess access) const {
  expected_sparse_.store(access == FileAccess::kSparse);
  if (is_located_.load()) Apply(access);
}

void SegmentFile::Apply(FileAccess access) const {
  file_->Expect(access);
  sparse_.store(access == FileAccess::kSparse, std::memory_order_relaxed);
}

void SegmentFile::AskAhead(absl::string_view part) const {
  MappedFile::AskAhead(part);
  bytes_asked_.fetch_add(static_cast<int64_t>(part.size()), std::memory_order_relaxed);
}

void SegmentFile::Load(const std::atomic<bool>& cancelled) const {
  Apply(FileAccess::kLargePages);
  file_->Load(cancelled);
}

void SegmentFile::ReleasePages() const {
  if (expected_sparse_.load()) {
    Apply(FileAccess::kSparse);
    bytes_asked_.store(0, std::memory_order_relaxed);
  }
  file_->ReleasePages();
}

absl::StatusOr<std::optional<absl::string_view>> SegmentFile::Find(absl::string_view key) const {
  const std::shared_ptr<const SstEntries> located = Located();
  const std::vector<SstEntry>& entries = located->entries;
  const auto at = std::lower_bound(
      entries.begin(), entries.end(), key,
      [](const SstEntry& entry, absl::string_view wanted) { return entry.key < wanted; });
  if (at != entries.end() && at->key == key) return at->value;
  if (at == entries.end() && !located->status.ok() && key <= last_key_) {
    return Annotate(located->status, path_);
  }
  // Not there, unless damage to a key made it another one: then that one stands where this should,
  // and does not fit its value.
  for (auto beside = at == entries.begin() ? at : at - 1; beside != entries.end() && beside <= at;
       ++beside) {
    if (const auto view = SegmentView::Open(beside->key, beside->value); !view.ok()) {
      return Annotate(view.status(), absl::StrCat(path_, ": beside it"));
    }
  }
  return std::nullopt;
}

namespace {

std::vector<rocksdb::SstFileMetaData> FilesOf(const OpenDb& db, ContextId id) {
  const auto [begin, end] = ContextKeyRange(id);
  rocksdb::ColumnFamilyMetaData family;
  db.db->GetColumnFamilyMetaData(db.segments, &family);
  std::vector<rocksdb::SstFileMetaData> files;
  for (const rocksdb::LevelMetaData& level : family.levels) {
    for (const rocksdb::SstFileMetaData& meta : level.files) {
      if (meta.smallestkey >= begin && meta.smallestkey < end) files.push_back(meta);
    }
  }
  return files;
}

std::string PathOf(const rocksdb::SstFileMetaData& meta) {
  return absl::StrCat(meta.directory, "/", meta.relative_filename);
}

}  // namespace

absl::StatusOr<std::vector<std::shared_ptr<const SegmentFile>>> OpenSegmentFiles(const OpenDb& db,
                                                                                 ContextId id) {
  std::vector<std::shared_ptr<const SegmentFile>> files;
  for (const rocksdb::SstFileMetaData& meta : FilesOf(db, id)) {
    ASSIGN_OR_RETURN(auto file,
                     SegmentFile::Open(PathOf(meta), meta.smallestkey, meta.largestkey, meta.size));
    files.push_back(std::move(file));
  }
  std::sort(files.begin(), files.end(),
            [](const auto& a, const auto& b) { return a->first_key() < b->first_key(); });
  return files;
}

void CloseTogether(std::vector<std::shared_ptr<const SegmentFile>> files) {
  constexpr int64_t kThreads = 8;  // where the disk is told of each stretch, most wait for it
  const auto count = static_cast<int64_t>(files.size());
  // Where there are no more threads, they go one after the other.
  (void)CatchThrown("closing files", [&] {
    ThreadPool pool(static_cast<int>(std::clamp<int64_t>(count, 1, kThreads)) - 1);
    pool.ParallelFor(count, [&files](int64_t i) { files[static_cast<size_t>(i)] = nullptr; });
    return absl::OkStatus();
  });
}

void MakeReadOnly(const OpenDb& db, ContextId id) {
  for (const rocksdb::SstFileMetaData& meta : FilesOf(db, id)) {
    (void)chmod(PathOf(meta).c_str(), S_IRUSR);
  }
}

}  // namespace carrel::kvstore
