#include "kvstore/storage/stored_context.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/synchronization/mutex.h"
#include "common/mapped_file.h"
#include "common/status.h"
#include "kvstore/storage/rocks.h"
#include "kvstore/storage/segment_file.h"
#include "kvstore/storage/sst_blocks.h"
#include "kvstore/storage/store.h"
#include "rocksdb/sst_file_reader.h"

namespace carrel::kvstore {
namespace {

// Fills `bytes` from `offset` of the file through the page cache, but not through the mapping: pages
// that were not cached do not stay, so that who reads everything once drives nobody's pages out.
absl::Status ReadAside(const MappedFile& file, int64_t offset, std::string& bytes) {
  bool from_disk = false;
  for (size_t done = 0; done < bytes.size();) {
    iovec rest{bytes.data() + done, bytes.size() - done};
    const auto at = static_cast<off_t>(offset + static_cast<int64_t>(done));
    ssize_t count = from_disk ? -1 : preadv2(file.fd(), &rest, 1, at, RWF_NOWAIT);
    if (count <= 0) {  // not cached, or not told by this kernel
      from_disk = true;
      count = pread(file.fd(), rest.iov_base, rest.iov_len, at);
    }
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      return absl::DataLossError(absl::StrCat(file.path(), ": read at byte ", at, ": ",
                                              count < 0 ? strerror(errno) : "the file ends"));
    }
    done += static_cast<size_t>(count);
  }
  if (from_disk) {
    (void)posix_fadvise(file.fd(), offset, static_cast<off_t>(bytes.size()), POSIX_FADV_DONTNEED);
  }
  return absl::OkStatus();
}

class PinnedSegmentImpl : public PinnedSegment {
 public:
  PinnedSegmentImpl(std::shared_ptr<const SegmentFile> file, std::unique_ptr<SegmentView> view,
                    std::string where)
      : file_(std::move(file)), view_(std::move(view)), where_(std::move(where)) {}

  absl::string_view payload() const override { return view_->payload(); }
  uint8_t dtype() const override { return view_->dtype(); }
  absl::Status Verify(int64_t begin, int64_t end) const override {
    absl::Status status = view_->Verify(begin, end);
    return status.ok() ? status : Annotate(status, where_);
  }
  bool fully_verified() const override { return view_->fully_verified(); }
  const SegmentView* view() const override { return view_.get(); }
  bool sparse() const override { return file_->sparse(); }
  void AskAhead(int64_t begin, int64_t end) const override {
    if (!file_->sparse()) return;
    view_->ForEachUnverified(begin, end, [this](absl::string_view part) { file_->AskAhead(part); });
  }
  void Forget() const { view_->Forget(); }
  // As StoredContext::Scrub, of this segment; false: go_on ended it.
  absl::StatusOr<bool> Scrub(absl::FunctionRef<bool(int64_t)> go_on) const {
    const auto size = static_cast<int64_t>(view_->payload().size());
    const int64_t offset = view_->payload().data() - file_->mapped().bytes().data();
    std::string buffer;
    for (int64_t at = 0; at < size; at += StoredContext::kScrubStep) {
      buffer.resize(static_cast<size_t>(std::min(StoredContext::kScrubStep, size - at)));
      absl::Status status = ReadAside(file_->mapped(), offset + at, buffer);
      if (status.ok()) status = view_->CheckChunks(at / kChunkBytes, buffer);
      if (!status.ok()) return Annotate(status, where_);
      if (!go_on(static_cast<int64_t>(buffer.size()))) return false;
    }
    return true;
  }

 private:
  const std::shared_ptr<const SegmentFile> file_;  // keeps the bytes mapped
  const std::unique_ptr<SegmentView> view_;
  const std::string where_;
};

class StoredContextImpl : public StoredContext {
 public:
  StoredContextImpl(ContextId id, v1::Manifest manifest,
                    std::vector<std::shared_ptr<const SegmentFile>> files)
      : id_(id), manifest_(std::move(manifest)), files_(std::move(files)) {
    for (uint32_t layer = 0; layer < manifest_.layers(); ++layer) {
      layer_files_.push_back(FindFiles(static_cast<int32_t>(layer)));
    }
  }

  absl::Status Bind() {
    if (manifest_.content_id().empty()) return absl::OkStatus();
    ASSIGN_OR_RETURN(digests_, SegmentDigests::Of(manifest_));
    bound_ = true;
    return absl::OkStatus();
  }

  const v1::Manifest& manifest() const override { return manifest_; }

  absl::StatusOr<std::shared_ptr<const PinnedSegment>> Segment(int32_t layer, Kind kind,
                                                               KvHead kv_head,
                                                               uint32_t segment) const override {
    const SegmentKey key{id_, layer, kind, kv_head, segment};
    RETURN_IF_ERROR(ValidateKey(key));
    const std::string bytes = EncodeKey(key);
    {
      absl::ReaderMutexLock lock(&mu_);
      if (const auto found = segments_.find(bytes); found != segments_.end()) return found->second;
    }
    const int64_t epoch = forgets_.load(std::memory_order_acquire);
    ASSIGN_OR_RETURN(std::shared_ptr<const PinnedSegmentImpl> pinned, Open(key, bytes));
    absl::MutexLock lock(&mu_);
    // What was opened while a file was being forgotten is for this caller alone, who will look.
    if (forgets_.load(std::memory_order_acquire) != epoch) return pinned;
    // Whoever came first: a chunk that one user verified is verified for all.
    return segments_.try_emplace(bytes, std::move(pinned)).first->second;
  }

  absl::StatusOr<int64_t> Look(int32_t layer) const override { return LookAt(FilesOf(layer)); }
  absl::StatusOr<int64_t> LookAtAll() const override { return LookAt(files_); }
  void Scrub(absl::FunctionRef<bool(int64_t)> go_on,
             std::vector<absl::Status>& damaged) const override {
    for (const auto& file : files_) {
      const absl::StatusOr<bool> went_on = ScrubFile(*file, go_on);
      if (!went_on.ok()) {
        damaged.push_back(went_on.status());
        file->Distrust([&] { ForgetFile(*file); });
      } else if (!*went_on) {
        return;
      }
    }
  }

  void Expect(FileAccess access) const override {
    for (const auto& file : files_) file->Expect(access);
  }
  int64_t LayerBytes(int32_t layer) const override {
    int64_t bytes = 0;
    for (const auto& file : FilesOf(layer)) bytes += file->bytes();
    return bytes;
  }
  int64_t LayerBytesAsked(int32_t layer) const override {
    int64_t bytes = 0;
    for (const auto& file : FilesOf(layer)) bytes += file->sparse() ? file->bytes_asked() : 0;
    return bytes;
  }
  void Load(int32_t layer, const std::atomic<bool>& cancelled) const override {
    for (const auto& file : FilesOf(layer)) file->Load(cancelled);
    Forget(layer);
  }
  void ReleasePages(int32_t layer) const override {
    for (const auto& file : FilesOf(layer)) file->ReleasePages();
    Forget(layer);
  }

  absl::StatusOr<uint32_t> SegmentCount(int32_t layer, Kind kind, KvHead kv_head) const override {
    SegmentKey key{id_, layer, kind, kv_head, 0};
    RETURN_IF_ERROR(ValidateKey(key));
    if (bound_ && kind != Kind::kManifest) return digests_.Count(layer, kind, kv_head);
    for (;; ++key.segment) {
      ASSIGN_OR_RETURN(const Found found, Find(key, EncodeKey(key)));
      if (!found.value.has_value()) return key.segment;
      if (kind == Kind::kManifest) return 1;
    }
  }

 private:
  // A segment as it is now, whatever is known of it.
  absl::StatusOr<std::shared_ptr<const PinnedSegmentImpl>> Open(const SegmentKey& key,
                                                                const std::string& bytes) const {
    const absl::string_view digest = digests_.Find(key);
    Found found;
    if (!bound_ || !digest.empty()) {
      ASSIGN_OR_RETURN(found, Find(key, bytes));
    }
    if (!found.value.has_value()) {
      if (!digest.empty()) return absl::DataLossError(absl::StrCat(Where(key), ": is missing"));
      return absl::NotFoundError(absl::StrCat(Where(key), ": not stored"));
    }
    auto view = SegmentView::Open(bytes, *found.value);
    if (!view.ok()) return Annotate(view.status(), Where(key));
    if (bound_) RETURN_IF_ERROR(Annotate(CheckDigest(bytes, **view, digest), Where(key)));
    return std::make_shared<const PinnedSegmentImpl>(found.file, *std::move(view), Where(key));
  }

  absl::StatusOr<int64_t> LookAt(absl::Span<const std::shared_ptr<const SegmentFile>> files) const {
    int64_t changes = 0;
    for (const auto& file : files) {
      const absl::StatusOr<int64_t> found = file->Look([&] { ForgetFile(*file); });
      if (!found.ok()) {
        return Annotate(found.status(), absl::StrCat("context ", manifest_.name()));
      }
      changes += *found;
    }
    return changes;
  }

  void ForgetFile(const SegmentFile& file) const {
    absl::MutexLock lock(&mu_);
    forgets_.fetch_add(1, std::memory_order_acq_rel);
    for (auto it = segments_.begin(); it != segments_.end();) {
      const auto at = it++;
      if (at->first < file.first_key() || at->first > file.last_key()) continue;
      at->second->Forget();
      segments_.erase(at);
    }
  }

  // False: go_on ended it.
  absl::StatusOr<bool> ScrubFile(const SegmentFile& file,
                                 absl::FunctionRef<bool(int64_t)> go_on) const {
    const auto located = file.Entries();
    if (!located.ok()) {
      return Annotate(located.status(), absl::StrCat("context ", manifest_.name()));
    }
    for (const SstEntry& entry : (*located)->entries) {
      const std::string bytes(entry.key);
      ASSIGN_OR_RETURN(const SegmentKey key, DecodeKey(bytes));
      ASSIGN_OR_RETURN(const auto segment, Open(key, bytes));
      ASSIGN_OR_RETURN(const bool went_on, segment->Scrub(go_on));
      if (!went_on) return false;
    }
    // Zeros of a mapping that failed prove nothing.
    RETURN_IF_ERROR(file.mapped().CheckReadable());
    return true;
  }

  struct Found {
    std::shared_ptr<const SegmentFile> file;
    std::optional<absl::string_view> value;  // nullopt: there is none
  };

  static absl::Status CheckDigest(const std::string& key, const SegmentView& view,
                                  absl::string_view wanted) {
    const std::string found = SegmentDigest(key, view.proof());
    if (found == wanted) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat("is of another revision: its digest is ", absl::BytesToHexString(found),
                     ", in the manifest it is ", absl::BytesToHexString(wanted)));
  }

  // Keys of the layer lie in [first, second).
  std::pair<std::string, std::string> KeysOf(int32_t layer) const {
    SegmentKey first{id_, layer, Kind::kKeyRows, KvHead(0), 0};
    SegmentKey next = first;
    next.layer = layer + 1;
    return {EncodeKey(first), BytesBefore(EncodeKey(next))};  // where the next one's fence stands
  }

  using Files = absl::Span<const std::shared_ptr<const SegmentFile>>;
  Files FindFiles(int32_t layer) const {
    const auto [begin, end] = KeysOf(layer);
    const auto first = std::lower_bound(
        files_.begin(), files_.end(), begin,
        [](const auto& file, const std::string& key) { return file->last_key() < key; });
    auto last = first;
    while (last != files_.end() && (*last)->first_key() < end) ++last;
    return {files_.data() + (first - files_.begin()), static_cast<size_t>(last - first)};
  }
  Files FilesOf(int32_t layer) const {
    const auto index = static_cast<size_t>(layer);
    return index < layer_files_.size() ? layer_files_[index] : Files();
  }

  void Forget(int32_t layer) const {
    const auto [begin, end] = KeysOf(layer);
    absl::ReaderMutexLock lock(&mu_);
    for (const auto& [key, segment] : segments_) {
      if (key >= begin && key < end) segment->Forget();
    }
  }

  std::string Where(const SegmentKey& key) const {
    return absl::StrCat("context ", manifest_.name(), ": ", DescribeKey(key));
  }

  absl::StatusOr<Found> Find(const SegmentKey& key, const std::string& bytes) const {
    const auto at = std::lower_bound(
        files_.begin(), files_.end(), bytes,
        [](const auto& file, const std::string& wanted) { return file->last_key() < wanted; });
    if (at == files_.end() || (*at)->first_key() > bytes) return Found{};
    auto value = (*at)->Find(bytes);
    if (!value.ok()) return Annotate(value.status(), Where(key));
    return Found{*at, *value};
  }

  const ContextId id_;
  const v1::Manifest manifest_;
  SegmentDigests digests_;  // of manifest_
  bool bound_ = false;
  const std::vector<std::shared_ptr<const SegmentFile>> files_;
  std::vector<Files> layer_files_;  // [layers]
  mutable std::atomic<int64_t> forgets_{0};
  mutable absl::Mutex mu_;
  mutable absl::flat_hash_map<std::string, std::shared_ptr<const PinnedSegmentImpl>> segments_
      ABSL_GUARDED_BY(mu_);
};

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

absl::StatusOr<std::shared_ptr<const StoredContext>> MakeStoredContext(
    ContextId id, v1::Manifest manifest, std::vector<std::shared_ptr<const SegmentFile>> files) {
  auto context = std::make_shared<StoredContextImpl>(id, std::move(manifest), std::move(files));
  RETURN_IF_ERROR(context->Bind());
  return context;
}

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
