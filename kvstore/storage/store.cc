#include "kvstore/storage/store.h"

#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/mapped_file.h"
#include "common/shown.h"
#include "common/status.h"
#include "kvstore/format/context_name.h"
#include "kvstore/storage/catalog.h"
#include "kvstore/storage/context_import.h"
#include "kvstore/storage/import_remains.h"
#include "kvstore/storage/rocks.h"
#include "kvstore/storage/segment_file.h"
#include "kvstore/storage/sst_blocks.h"
#include "kvstore/storage/stored_context.h"
#include "rocksdb/sst_file_reader.h"
#include "rocksdb/sst_file_writer.h"

namespace carrel::kvstore {
namespace {

namespace fs = std::filesystem;

// What RocksDB's own log, journal and catalog grow by when a store is opened: little, as a full
// disk must not keep anyone from deleting a context.
constexpr int64_t kOpenRoom = int64_t{256} << 10;

absl::Status FromErrorCode(const std::error_code& error, absl::string_view what) {
  return error ? ErrnoStatus(error.value(), what) : absl::OkStatus();
}

// A file of a store that only takes room, so that who deletes a context on a full disk has some: it is
// freed first, and made again when the disk has room. Without it a store works, but on a full disk.
class Ballast {
 public:
  // More than RocksDB writes when it opens and when a context is deleted.
  static constexpr int64_t kBytes = int64_t{1} << 20;

  explicit Ballast(const std::string& folder) : path_(folder + "/ballast") {}

  // Makes it, as large as there is room for and it can be of use, or leaves it.
  void Make() const {
    struct stat info;
    const int64_t has = stat(path_.c_str(), &info) == 0 ? info.st_size : 0;
    if (has >= kBytes) return;
    const int fd = open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return;
    // Allocated, not only as long: a hole would take no room.
    int64_t made = has;
    for (int64_t bytes = kBytes; bytes > has && bytes >= kBytes / 8; bytes /= 2) {
      if (fallocate(fd, 0, 0, bytes) != 0) continue;
      made = bytes;
      break;
    }
    close(fd);
    if (made == 0) unlink(path_.c_str());
  }

  // Whether there was one.
  bool Free() const { return unlink(path_.c_str()) == 0; }

 private:
  const std::string path_;
};

// Changes when contexts are published or deleted: RocksDB's list of files, by name, size and time.
std::string StateOf(const std::string& folder) {
  const auto current = ReadFile(folder + "/db/CURRENT");
  if (!current.ok()) return "";
  const std::string list = absl::StrCat(folder, "/db/", absl::StripSuffix(*current, "\n"));
  struct stat info;
  if (stat(list.c_str(), &info) != 0) return "";
  return absl::StrCat(list, " ", info.st_ino, " ", info.st_size, " ", info.st_mtim.tv_sec, ".",
                      info.st_mtim.tv_nsec);
}

// A file that Publish was given, after a look at every key, footer and chunk table in it: what is
// published is what was written.
struct CheckedFile {
  std::string path;
  std::string first, last;                                   // keys, with fences
  std::vector<std::pair<SegmentKey, std::string>> segments;  // with their digests, in order
};

absl::StatusOr<CheckedFile> CheckFile(const std::string& path, ContextId id, bool deep) {
  ASSIGN_OR_RETURN(const std::unique_ptr<MappedFile> file, MappedFile::Open(path));
  rocksdb::SstFileReader reader(SegmentOptions());
  RETURN_IF_ERROR(FromRocks(reader.Open(path), path));
  const SstEntries found = WalkToOffset(file->bytes(), reader.GetTableProperties()->data_size);
  RETURN_IF_ERROR(Annotate(found.status, path));
  CheckedFile checked{
      .path = path, .first = std::string(found.first_key), .last = std::string(found.last_key)};
  for (const SstEntry& entry : found.entries) {
    const auto key = DecodeKey(entry.key);
    if (!key.ok()) return Annotate(key.status(), path);
    if (key->context != id || key->kind == Kind::kManifest) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": holds ", DescribeKey(*key),
                                                     " of context #", key->context.ToString(),
                                                     ", to be published as #", id.ToString()));
    }
    const auto view = SegmentView::Open(entry.key, entry.value);
    absl::Status status = view.status();
    if (status.ok() && deep) {
      status = (*view)->Verify(0, static_cast<int64_t>((*view)->payload().size()));
    }
    if (!status.ok()) return Annotate(status, absl::StrCat(path, ": ", DescribeKey(*key)));
    checked.segments.emplace_back(*key, SegmentDigest(entry.key, (*view)->proof()));
  }
  return checked;
}

// Checks the files (deep: every byte), and adds the digests of all their segments to the manifest.
absl::Status BindFiles(absl::Span<const std::string> paths, ContextId id, bool deep,
                       v1::Manifest& manifest) {
  if (paths.empty()) return absl::InvalidArgumentError("publish: no SST files");
  std::vector<CheckedFile> files;
  for (const std::string& path : paths) {
    ASSIGN_OR_RETURN(CheckedFile file, CheckFile(path, id, deep));
    files.push_back(std::move(file));
  }
  std::sort(files.begin(), files.end(),
            [](const CheckedFile& a, const CheckedFile& b) { return a.first < b.first; });
  manifest.clear_segment_digests();
  for (size_t i = 0; i < files.size(); ++i) {
    if (i > 0 && files[i].first <= files[i - 1].last) {
      return absl::InvalidArgumentError(
          absl::StrCat("publish: ", files[i - 1].path, " and ", files[i].path, " overlap"));
    }
    for (const auto& [key, digest] : files[i].segments) {
      RETURN_IF_ERROR(Annotate(AddSegmentDigest(key, digest, manifest), files[i].path));
    }
  }
  return absl::OkStatus();
}

// Entries of the catalog, by key.
using CatalogEdit = std::map<std::string, std::string>;

absl::Status WriteCatalogFile(const std::string& path, const CatalogEdit& edit) {
  rocksdb::SstFileWriter writer(rocksdb::EnvOptions(), CatalogOptions(), nullptr, false);
  RETURN_IF_ERROR(FromRocks(writer.Open(path), path));
  for (const auto& [key, value] : edit) RETURN_IF_ERROR(FromRocks(writer.Put(key, value), path));
  return FromRocks(writer.Finish(), path);
}

std::string UserText() {
  const uid_t uid = geteuid();
  const passwd* const entry = getpwuid(uid);
  return entry == nullptr ? absl::StrCat("user ", uid)
                          : absl::StrCat("user ", entry->pw_name, " (", uid, ")");
}

// Whether there is a store cannot be told.
absl::Status CannotLook(const std::string& folder, const std::error_code& error) {
  const absl::Status status = ErrnoStatus(error.value(), absl::StrCat("store ", folder));
  return absl::IsPermissionDenied(status)
             ? Annotate(status, absl::StrCat(UserText(), " may not look into it"))
             : status;
}

class StoreImpl : public Store {
 public:
  // state: read before db was opened.
  StoreImpl(std::unique_ptr<OpenDb> db, StoreMode mode, std::string state)
      : mode_(mode),
        folder_(db->folder),
        publishing_(folder_ + "/publishing"),
        ballast_(folder_),
        db_(std::move(db)),
        state_(std::move(state)) {}
  ~StoreImpl() override {
    if (mode_ == StoreMode::kReadWrite) ballast_.Make();
  }

  // Ends each Delete that a crash interrupted after hiding, and each import after publishing.
  absl::Status Recover() {
    absl::MutexLock lock(&mu_);
    ballast_.Make();
    std::error_code error;
    fs::remove_all(publishing_, error);
    RETURN_IF_ERROR(FromErrorCode(error, publishing_));
    ASSIGN_OR_RETURN(const std::vector<CatalogEntry> entries, ReadCatalog(*db_));
    for (const CatalogEntry& entry : entries) {
      if (entry.hidden) RETURN_IF_ERROR(FreeContext(*db_, entry));
    }
    EndPublishedImports(imports(), [&](const std::string& id) {
      return std::any_of(entries.begin(), entries.end(),
                         [&](const CatalogEntry& entry) { return entry.id.ToString() == id; });
    });
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<v1::Manifest>> List(
      std::vector<absl::Status>* unreadable) const override {
    absl::ReaderMutexLock lock(&mu_);
    ASSIGN_OR_RETURN(std::vector<CatalogEntry> entries, ReadCatalog(*db_));
    std::vector<v1::Manifest> manifests;
    for (CatalogEntry& entry : entries) {
      if (entry.hidden) continue;
      if (entry.manifest.ok()) {
        manifests.push_back(*std::move(entry.manifest));
      } else if (unreadable != nullptr) {
        unreadable->push_back(entry.manifest.status());
      } else {
        return entry.manifest.status();
      }
    }
    std::sort(manifests.begin(), manifests.end(),
              [](const v1::Manifest& a, const v1::Manifest& b) { return a.name() < b.name(); });
    return manifests;
  }

  absl::StatusOr<v1::Manifest> GetManifest(const std::string& name) const override {
    absl::ReaderMutexLock lock(&mu_);
    ASSIGN_OR_RETURN(CatalogEntry entry, Find(name));
    return std::move(entry.manifest);
  }

  absl::StatusOr<std::vector<UnfinishedPrefill>> ListUnfinished() const override {
    return kvstore::ListUnfinished(folder_);
  }

  absl::StatusOr<std::shared_ptr<const StoredContext>> OpenContext(
      const std::string& name) const override {
    absl::ReaderMutexLock lock(&mu_);
    ASSIGN_OR_RETURN(CatalogEntry entry, Find(name));
    if (!entry.manifest.ok()) return entry.manifest.status();
    auto files = OpenSegmentFiles(*db_, entry.id);
    if (!files.ok()) return Annotate(files.status(), absl::StrCat("context ", name));
    return MakeStoredContext(entry.id, *std::move(entry.manifest), *std::move(files));
  }

  absl::Status Publish(const v1::Manifest& manifest,
                       absl::Span<const std::string> sst_files) override {
    // Before files are read.
    RETURN_IF_ERROR(CheckWritable(absl::StrCat("publish ", manifest.name())));
    RETURN_IF_ERROR(EncodeManifest(manifest).status());
    ASSIGN_OR_RETURN(const ContextId id, ContextIdOf(manifest));
    RETURN_IF_ERROR(CheckFree(manifest.name(), id, {}));
    v1::Manifest complete = manifest;
    RETURN_IF_ERROR(BindFiles(sst_files, id, /*deep=*/false, complete));
    ASSIGN_OR_RETURN(const std::string value, EncodeManifest(complete));
    return IngestNew(manifest.name(), id, value, sst_files);
  }

  absl::StatusOr<std::unique_ptr<ContextExport>> Export(const std::string& name) const override {
    absl::ReaderMutexLock lock(&mu_);
    ASSIGN_OR_RETURN(CatalogEntry entry, Find(name));
    RETURN_IF_ERROR(entry.manifest.status());
    if (entry.id.is_number()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "export ", name, ": it is of format version ", entry.manifest->format_version(),
          " and unbound; carrel upgrade ", name, " binds it"));
    }
    ASSIGN_OR_RETURN(const std::string manifest, ReadManifestBytes(*db_, entry.id));
    auto files = OpenSegmentFiles(*db_, entry.id);
    if (!files.ok()) return Annotate(files.status(), absl::StrCat("context ", name));
    ASSIGN_OR_RETURN(auto context, MakeStoredContext(entry.id, *std::move(entry.manifest), *files));
    return MakeContextExport(std::move(context), manifest, *std::move(files));
  }

  absl::StatusOr<std::unique_ptr<ContextImport>> Import(const std::string& name,
                                                        const ImportGuard& guard) override {
    RETURN_IF_ERROR(CheckWritable("import"));
    if (!name.empty()) RETURN_IF_ERROR(ValidateContextName(name));
    return MakeContextImport(
        ImportsFolderOf(imports(), guard.owner), name,
        {.check_free =
             [this, guard](const std::string& as, ContextId id, int64_t bytes) {
               RETURN_IF_ERROR(CheckFree(as, id, guard));
               return guard.admit == nullptr ? absl::OkStatus() : guard.admit(as, bytes);
             },
         .most_remains = guard.most_remains,
         .publish =
             [this, guard](const std::string& as, const std::string& manifest,
                           const std::vector<std::string>& files) {
               return PublishImported(as, manifest, files, guard);
             }});
  }

  RemovedRemains RemoveOldImports(absl::Duration age) override {
    if (mode_ != StoreMode::kReadWrite) return {};
    return RemoveOldImportRemains(imports(), age);
  }

  RemovedUnfinished RemoveOldUnfinished(absl::Duration age) override {
    if (mode_ != StoreMode::kReadWrite) return {};
    return SweepUnfinished(folder_, [age](const std::string&) { return age; });
  }

  absl::Status Upgrade(const std::string& name, absl::FunctionRef<void(double)> progress) override {
    const ContextId id = ContextId::Random();
    const std::string folder = absl::StrCat(publishing_, "/upgrade-", id.ToString());
    const absl::Cleanup remove = [&folder] {
      std::error_code ignored;
      fs::remove_all(folder, ignored);
    };
    ASSIGN_OR_RETURN(const std::shared_ptr<const StoredContext> from, OpenForUpgrade(name));
    std::error_code error;
    fs::create_directories(folder, error);
    RETURN_IF_ERROR(FromErrorCode(error, folder));
    int64_t bytes = kPublishRoom;
    const auto layers = static_cast<int32_t>(from->manifest().layers());
    for (int32_t layer = 0; layer < layers; ++layer) bytes += from->LayerBytes(layer);
    RETURN_IF_ERROR(ProbeRoom(folder + "/copy", 0, bytes));
    ASSIGN_OR_RETURN(const std::vector<std::string> files,
                     CopyContext(*from, id, folder, progress));
    v1::Manifest manifest = from->manifest();
    manifest.set_format_version(kManifestFormatVersion);
    manifest.clear_number();
    manifest.set_context_id(id.Bytes());
    RETURN_IF_ERROR(BindFiles(files, id, /*deep=*/false, manifest));
    absl::MutexLock lock(&mu_);
    ASSIGN_OR_RETURN(const CatalogEntry old, Find(name));
    if (old.id != ContextId(from->manifest().number())) {
      return absl::AbortedError(absl::StrCat("upgrade ", name, ": it became another meanwhile"));
    }
    ASSIGN_OR_RETURN(const std::string value, EncodeManifest(manifest));
    ForgetNames();
    RETURN_IF_ERROR(
        Ingest(id, {{ManifestKey(id), value}, {ManifestKey(old.id), HiddenMark(old.id)}}, files));
    return Annotate(FreeContext(*db_, old), absl::StrCat("context ", name, " is upgraded, the ",
                                                         "space of the old one comes back later"));
  }

  absl::Status Delete(const std::string& name) override {
    std::vector<std::shared_ptr<const SegmentFile>> files;
    const absl::Status deleted = DeleteBut(name, files);
    CloseTogether(std::move(files));  // nobody waits for the lock meanwhile
    absl::MutexLock lock(&mu_);
    ballast_.Make();
    return deleted;
  }

  absl::StatusOr<bool> Refresh() override {
    if (mode_ == StoreMode::kReadWrite) return false;
    {
      absl::ReaderMutexLock lock(&mu_);
      if (StateOf(folder_) == state_) return false;
    }
    absl::MutexLock lock(&mu_);
    absl::Status failed;
    // The writer may remove a file between our reading of its name and of itself.
    for (int attempt = 0; attempt < 5; ++attempt) {
      std::string state = StateOf(folder_);
      if (state == state_) return true;  // another thread was faster
      auto db = OpenRocks(folder_, mode_);
      if (db.ok()) {
        db_ = *std::move(db);
        state_ = std::move(state);
        ForgetNames();
        return true;
      }
      failed = db.status();
      absl::SleepFor(absl::Milliseconds(10));
    }
    return Annotate(failed, "looking for contexts that were published since");
  }

 private:
  // files: get those of the context, whose names RocksDB takes away: their pages come back once these are closed.
  absl::Status DeleteBut(const std::string& name,
                         std::vector<std::shared_ptr<const SegmentFile>>& files) {
    absl::MutexLock lock(&mu_);
    RETURN_IF_ERROR(CheckWritable(absl::StrCat("delete context ", Shown(name))));
    absl::StatusOr<CatalogEntry> found = Find(name);
    if (absl::IsNotFound(found.status())) {
      const absl::Status removed = RemoveUnfinished(folder_, name);
      return absl::IsNotFound(removed) || absl::IsInvalidArgument(removed) ? found.status()
                                                                           : removed;
    }
    ASSIGN_OR_RETURN(const CatalogEntry entry, std::move(found));
    // On a full disk the few bytes that this writes find their place where the ballast was.
    if (!ProbeRoom(folder_ + "/db", 0, kOpenRoom).ok()) ballast_.Free();
    absl::Status freed = HideContext(*db_, entry);
    const bool hidden = freed.ok();
    if (hidden) {
      if (auto open = OpenSegmentFiles(*db_, entry.id); open.ok()) files = *std::move(open);
      freed = FreeContext(*db_, entry);
    }
    ForgetName(entry.id, freed.ok());
    if (!hidden) return freed;
    return Annotate(freed,
                    absl::StrCat("context ", name, " is deleted, its space comes back later"));
  }

  // The catalog is about to be another; who holds mu_ for writing says so.
  void ForgetNames() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    absl::MutexLock lock(&names_mu_);
    names_.reset();
  }

  void ForgetName(ContextId id, bool gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!gone) return ForgetNames();
    absl::MutexLock lock(&names_mu_);
    if (names_.has_value()) names_->Remove(id);
  }

  std::string imports() const { return folder_ + "/importing"; }

  absl::Status CheckWritable(absl::string_view attempt) const {
    if (mode_ == StoreMode::kReadWrite) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(attempt, ": store ", db_->folder, " is open read-only"));
  }

  absl::StatusOr<std::shared_ptr<const StoredContext>> OpenForUpgrade(
      const std::string& name) const {
    {
      absl::ReaderMutexLock lock(&mu_);
      RETURN_IF_ERROR(CheckWritable(absl::StrCat("upgrade ", name)));
      ASSIGN_OR_RETURN(const CatalogEntry entry, Find(name));
      if (entry.manifest.ok() && !entry.id.is_number()) {
        return absl::FailedPreconditionError(
            absl::StrCat("upgrade ", name, ": it is of format version ",
                         entry.manifest->format_version(), " already"));
      }
    }
    return OpenContext(name);
  }

  absl::StatusOr<v1::Manifest> PublishImported(const std::string& name, const std::string& bytes,
                                               const std::vector<std::string>& files,
                                               const ImportGuard& guard) {
    v1::Manifest manifest;
    if (!manifest.ParseFromString(bytes)) {
      return absl::DataLossError(absl::StrCat("import ", name, ": no Manifest message"));
    }
    manifest.set_name(name);
    manifest.set_content_id(Sha256Hex(bytes));
    RETURN_IF_ERROR(CheckImported(manifest));
    ASSIGN_OR_RETURN(const ContextId id, ContextIdOf(manifest));
    v1::Manifest found = manifest;
    RETURN_IF_ERROR(BindFiles(files, id, /*deep=*/true, found));
    if (found.SerializeAsString() != manifest.SerializeAsString()) {
      return absl::DataLossError(
          absl::StrCat("import ", name, ": its files hold other segments than its manifest names"));
    }
    RETURN_IF_ERROR(IngestNew(name, id, EncodeRecord(id, name, bytes), files, guard));
    return manifest;
  }

  absl::Status IngestNew(const std::string& name, ContextId id, const std::string& record,
                         absl::Span<const std::string> files, const ImportGuard& guard = {}) {
    absl::MutexLock lock(&mu_);
    RETURN_IF_ERROR(CheckFreeLocked(name, id, guard, /*whole=*/true));
    RETURN_IF_ERROR(ProbeRoom(db_->folder + "/db", 0, kPublishRoom));
    RETURN_IF_ERROR(Ingest(id, {{ManifestKey(id), record}}, files));
    absl::MutexLock names(&names_mu_);
    names_->Add(name, id);  // CheckFreeLocked read them
    return absl::OkStatus();
  }

  absl::Status CheckFree(const std::string& name, ContextId id, const ImportGuard& guard) const {
    absl::ReaderMutexLock lock(&mu_);
    return CheckFreeLocked(name, id, guard, /*whole=*/false);
  }

  // whole: all of the context is here, not only its header.
  absl::Status CheckFreeLocked(const std::string& name, ContextId id, const ImportGuard& guard,
                               bool whole) const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    absl::MutexLock names(&names_mu_);
    if (!names_.has_value()) {
      ASSIGN_OR_RETURN(const std::vector<CatalogEntry> entries, ReadCatalog(*db_));
      names_.emplace(entries);
    }
    if (names_->Find(name).has_value()) {
      return absl::AlreadyExistsError(
          absl::StrCat("context ", name, " exists in store ", db_->folder));
    }
    const std::string* const as = names_->NameOf(id);
    if (as == nullptr) return absl::OkStatus();
    const bool seen = guard.sees == nullptr || guard.sees(*as);
    if (!seen && whole) {
      return absl::AlreadyExistsError(
          absl::StrCat("publish ", name, ": context #", id.ToString(), " is published already"));
    }
    if (!seen) return absl::OkStatus();
    return absl::AlreadyExistsError(
        absl::StrCat("publish ", name, ": context #", id.ToString(), " is published as ", *as));
  }

  // Also finds a context that cannot be read: its entry says why. NotFound if there is none of the
  // name; if that cannot be told because a manifest cannot be read, DataLoss or why it cannot.
  absl::StatusOr<CatalogEntry> Find(const std::string& name) const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    const std::string message =
        absl::StrCat("context ", Shown(name), " is not in store ", db_->folder);
    std::optional<ContextId> known;
    {
      absl::MutexLock lock(&names_mu_);
      if (names_.has_value()) known = names_->Find(name);
      if (names_.has_value() && names_->complete() && !known.has_value())
        return absl::NotFoundError(message);
    }
    if (known.has_value()) {
      CatalogEntry entry = ReadCatalogEntry(*db_, *known);
      if (!entry.hidden && entry.name == name) return entry;
    }
    ASSIGN_OR_RETURN(std::vector<CatalogEntry> entries, ReadCatalog(*db_));
    {
      absl::MutexLock lock(&names_mu_);
      names_.emplace(entries);
    }
    std::string damaged;
    absl::StatusCode code = absl::StatusCode::kOk;
    for (CatalogEntry& entry : entries) {
      if (entry.hidden) continue;
      if (entry.name == name) return std::move(entry);
      // Of another format version the name is known all the same.
      if (!entry.manifest.ok() && !absl::IsFailedPrecondition(entry.manifest.status())) {
        absl::StrAppend(&damaged, damaged.empty() ? "" : "; ", entry.manifest.status().message());
        if (code != absl::StatusCode::kDataLoss) code = entry.manifest.status().code();
      }
    }
    if (damaged.empty()) return absl::NotFoundError(message);
    return absl::Status(
        code, absl::StrCat(message, ", unless its manifest is one that cannot be read: ", damaged));
  }

  // One atomic edit of RocksDB's own manifest makes layers and entries of the catalog visible.
  absl::Status Ingest(ContextId id, const CatalogEdit& edit,
                      absl::Span<const std::string> sst_files) {
    RETURN_IF_ERROR(MakePrivateFolder(publishing_));
    const std::string manifest_file =
        absl::StrCat(publishing_, "/manifest-", id.ToString(), ".sst");
    RETURN_IF_ERROR(WriteCatalogFile(manifest_file, edit));

    rocksdb::IngestExternalFileArg layers, catalog;
    layers.column_family = db_->segments;
    layers.external_files.assign(sst_files.begin(), sst_files.end());
    layers.options.move_files = true;
    layers.options.write_global_seqno = false;  // a file's bytes are never changed
    layers.options.allow_global_seqno = false;  // new ids overlap nothing
    layers.options.allow_blocking_flush = false;
    layers.options.fail_if_not_bottommost_level = true;
    catalog.column_family = db_->catalog;
    catalog.external_files = {manifest_file};
    catalog.options.move_files = true;
    catalog.options.write_global_seqno = false;
    RETURN_IF_ERROR(FromRocks(db_->db->IngestExternalFiles({layers, catalog}),
                              absl::StrCat("store ", db_->folder, ": publish")));
    MakeReadOnly(*db_, id);  // not before: RocksDB opens them for writing, to sync them
    return absl::OkStatus();
  }

  const StoreMode mode_;
  const std::string folder_;
  const std::string publishing_;
  const Ballast ballast_;
  std::unique_ptr<OpenDb> db_;  // under mu_; replaced by Refresh only
  std::string state_ ABSL_GUARDED_BY(mu_);
  // Readers see an ingestion in both column families or in none.
  mutable absl::Mutex mu_;
  // Of db_ as it is; none: to be read. Behind mu_.
  mutable absl::Mutex names_mu_;
  mutable std::optional<CatalogNames> names_ ABSL_GUARDED_BY(names_mu_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> Store::Open(const std::string& folder, StoreMode mode) {
  if (absl::StartsWith(folder, "s3://")) {
    return absl::InvalidArgumentError(
        absl::StrCat(folder,
                     " is a bucket, a folder is needed here: push and pull move contexts, "
                     "and ls, rm, verify and gc look after a bucket"));
  }
  std::error_code error;
  if (mode == StoreMode::kReadWrite) {
    for (const char* inside : {"", "/db"}) {
      const absl::Status made = MakePrivateFolder(folder + inside);
      if (absl::IsPermissionDenied(made)) return Annotate(made, UserText());
      RETURN_IF_ERROR(made);
    }
  } else if (!fs::exists(folder + "/db/CURRENT", error)) {
    if (error) return CannotLook(folder, error);
    return absl::NotFoundError(absl::StrCat("folder ", folder, " holds no store"));
  }
  if (mode == StoreMode::kReadWrite) {
    // A full disk must not keep anyone from deleting a context.
    absl::Status room = ProbeRoom(folder + "/db", 0, kOpenRoom);
    if (!room.ok() && Ballast(folder).Free()) room = ProbeRoom(folder + "/db", 0, kOpenRoom);
    RETURN_IF_ERROR(room);
  }
  std::string state = StateOf(folder);
  absl::StatusOr<std::unique_ptr<OpenDb>> opened = OpenRocks(folder, mode);
  if (absl::IsPermissionDenied(opened.status())) {
    return Annotate(opened.status(), absl::StrCat(UserText(), " may not read or write all of it"));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<OpenDb> db, std::move(opened));
  auto store = std::make_unique<StoreImpl>(std::move(db), mode, std::move(state));
  if (mode == StoreMode::kReadWrite) RETURN_IF_ERROR(store->Recover());
  return store;
}

}  // namespace carrel::kvstore
