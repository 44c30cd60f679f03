#include "kvstore/storage/segment_file.h"

#include <algorithm>
#include <utility>

#include "common/status.h"
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
  file->path_ = path;
  file->first_key_ = std::move(first_key);
  file->last_key_ = std::move(last_key);
  return file;
}

void SegmentFile::Locate() const {
  file_->Expect(FileAccess::kSparse);
  entries_ = WalkToKey(file_->bytes(), last_key_);
  is_located_.store(true);
  Apply(expected_sparse_.load() ? FileAccess::kSparse : FileAccess::kLargePages);
  const auto wanted = ContextOfKey(first_key_), found = ContextOfKey(entries_.first_key);
  if (wanted.ok() && found.ok() && *found != *wanted) {
    entries_ = {.status = absl::DataLossError(
                    absl::StrCat("is a file of another context, #", found->ToString()))};
  } else if (!entries_.entries.empty() && entries_.first_key != first_key_) {
    entries_ = {.status = absl::DataLossError("another first key")};
  }
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
  std::call_once(located_, [this] { Locate(); });
  const std::vector<SstEntry>& entries = entries_.entries;
  const auto at = std::lower_bound(
      entries.begin(), entries.end(), key,
      [](const SstEntry& entry, absl::string_view wanted) { return entry.key < wanted; });
  if (at != entries.end() && at->key == key) return at->value;
  if (at == entries.end() && !entries_.status.ok() && key <= last_key_) {
    return Annotate(entries_.status, path_);
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

absl::StatusOr<absl::Span<const SstEntry>> SegmentFile::Entries() const {
  std::call_once(located_, [this] { Locate(); });
  RETURN_IF_ERROR(Annotate(entries_.status, path_));
  return entries_.entries;
}

absl::StatusOr<std::vector<std::shared_ptr<const SegmentFile>>> OpenSegmentFiles(const OpenDb& db,
                                                                                 ContextId id) {
  const auto [begin, end] = ContextKeyRange(id);
  rocksdb::ColumnFamilyMetaData family;
  db.db->GetColumnFamilyMetaData(db.segments, &family);
  std::vector<std::shared_ptr<const SegmentFile>> files;
  for (const rocksdb::LevelMetaData& level : family.levels) {
    for (const rocksdb::SstFileMetaData& meta : level.files) {
      if (meta.smallestkey < begin || meta.smallestkey >= end) continue;
      ASSIGN_OR_RETURN(auto file,
                       SegmentFile::Open(absl::StrCat(meta.directory, "/", meta.relative_filename),
                                         meta.smallestkey, meta.largestkey, meta.size));
      files.push_back(std::move(file));
    }
  }
  std::sort(files.begin(), files.end(),
            [](const auto& a, const auto& b) { return a->first_key() < b->first_key(); });
  return files;
}

}  // namespace carrel::kvstore
