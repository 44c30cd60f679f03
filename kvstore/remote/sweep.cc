#include "kvstore/remote/sweep.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "common/status.h"
#include "kvstore/remote/push_record.h"

namespace carrel::kvstore {
namespace {

// What lies in the folder of one context.
struct Found {
  std::vector<ListedObject> files;
  bool manifest = false;
  std::vector<ListedUpload> uploads;
  absl::Time youngest = absl::InfinitePast();
};

// Manifest first, then files and uploads.
absl::Status RemoveAll(const Bucket& bucket, const SweepMark& mark, const std::string& id,
                       const Found& found) {
  RETURN_IF_ERROR(mark.Holds());
  if (found.manifest) RETURN_IF_ERROR(bucket.client().Remove(bucket.ManifestKey(id)));
  for (const ListedObject& file : found.files) {
    RETURN_IF_ERROR(mark.Holds());
    RETURN_IF_ERROR(bucket.client().Remove(file.key));
  }
  for (const ListedUpload& upload : found.uploads) {
    RETURN_IF_ERROR(mark.Holds());
    RETURN_IF_ERROR(bucket.client().AbortUpload(upload.key, upload.id));
  }
  return absl::OkStatus();
}

// What lies below a folder of contexts, or of one of them: by id.
absl::StatusOr<std::map<std::string, Found>> LookInto(const Bucket& bucket,
                                                      const std::string& folder) {
  std::map<std::string, Found> all;
  const auto id_of = [before = bucket.Folder("contexts").size()](const std::string& key) {
    return key.substr(before, key.find('/', before) - before);
  };
  RETURN_IF_ERROR(bucket.client().ForEach(folder, [&](const ListedObject& object) {
    const std::string id = id_of(object.key);
    Found& found = all[id];
    if (object.key == bucket.ManifestKey(id)) {
      found.manifest = true;
    } else {
      found.files.push_back(object);
    }
    found.youngest = std::max(found.youngest, object.modified);
    return absl::OkStatus();
  }));
  ASSIGN_OR_RETURN(const std::vector<ListedUpload> uploads, bucket.client().ListUploads(folder));
  for (const ListedUpload& upload : uploads) {
    Found& found = all[id_of(upload.key)];
    found.uploads.push_back(upload);
    found.youngest = std::max(found.youngest, upload.begun);
  }
  return all;
}

// Whether a name is bound to what the manifest describes, as the bucket is now.
absl::StatusOr<bool> IsBound(const Bucket& bucket, const std::string& id) {
  const absl::StatusOr<BucketManifest> manifest = bucket.ReadManifest(id);
  if (absl::IsNotFound(manifest.status())) return false;
  if (absl::IsDataLoss(manifest.status())) {  // it does not say its name: all names are asked
    std::vector<absl::Status> unreadable;
    ASSIGN_OR_RETURN(const std::vector<BoundName> names, bucket.ListNames(&unreadable));
    if (!unreadable.empty()) return unreadable.front();
    return std::any_of(names.begin(), names.end(),
                       [&id](const BoundName& name) { return name.context_id == id; });
  }
  RETURN_IF_ERROR(manifest.status());
  const absl::StatusOr<BoundName> name = bucket.ReadName(manifest->header.name);
  if (absl::IsNotFound(name.status())) return false;
  RETURN_IF_ERROR(name.status());
  return name->context_id == id;
}

class Sweeper {
 public:
  Sweeper(const Bucket& bucket, const SweepOptions& options) : bucket_(bucket), options_(options) {}

  absl::StatusOr<Swept> Run() {
    ASSIGN_OR_RETURN(const std::vector<BoundName> names, bucket_.ListNames(&swept_.unreadable));
    for (const BoundName& name : names) bound_[name.context_id] = name;
    ASSIGN_OR_RETURN(found_, LookInto(bucket_, bucket_.Folder("contexts")));
    for (const auto& [id, found] : found_) {
      const auto name = bound_.find(id);
      const bool whole = name != bound_.end() && found.manifest;
      Note(id, whole ? SweepStrays(id, found, name->second) : SweepContext(id));
    }
    for (const auto& [id, name] : bound_) {
      if (!found_.contains(id) || !found_[id].manifest) Note(name.name, SweepName(id, name));
    }
    RETURN_IF_ERROR(SweepRecords());
    return std::move(swept_);
  }

 private:
  bool IsYoung(absl::Time modified) const {
    return bucket_.client().ServerNow() - modified <= options_.grace;
  }

  void Note(const std::string& what, const absl::Status& status) {
    if (!status.ok()) swept_.unreadable.push_back(Annotate(status, what));
  }

  void Count(const Found& found) {
    swept_.files += static_cast<int64_t>(found.files.size());
    for (const ListedObject& file : found.files) swept_.bytes += file.size;
    swept_.uploads += static_cast<int64_t>(found.uploads.size());
  }

  // Null: the context is being pushed.
  absl::StatusOr<std::unique_ptr<SweepMark>> Mark(const std::string& id) {
    ASSIGN_OR_RETURN(std::unique_ptr<SweepMark> mark, SweepMark::Take(bucket_, id, options_.grace));
    if (mark == nullptr) ++swept_.pushed;
    return mark;
  }

  // No name, or no manifest: as it was listed, and as it is under the mark.
  absl::Status SweepContext(const std::string& id) {
    if (IsYoung(found_[id].youngest)) {
      ++swept_.young;
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(const std::unique_ptr<SweepMark> mark, Mark(id));
    if (mark == nullptr) return absl::OkStatus();
    ASSIGN_OR_RETURN(auto under, LookInto(bucket_, bucket_.ContextFolder(id)));
    const Found& now = under[id];
    if (IsYoung(now.youngest)) return absl::OkStatus();
    ASSIGN_OR_RETURN(const bool bound, IsBound(bucket_, id));
    if (bound) return absl::OkStatus();
    if (!options_.dry_run) RETURN_IF_ERROR(RemoveAll(bucket_, *mark, id, now));
    ++swept_.contexts;
    Count(now);
    return absl::OkStatus();
  }

  // Of a context that stays: files that its manifest does not name, and uploads.
  absl::Status SweepStrays(const std::string& id, const Found& found, const BoundName& name) {
    if (static_cast<int64_t>(found.files.size()) == name.files && found.uploads.empty()) {
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(const BucketManifest manifest, bucket_.ReadManifest(id));
    std::set<std::string> named;
    for (size_t i = 0; i < manifest.digests.size(); ++i) {
      named.insert(bucket_.FileKey(id, static_cast<int64_t>(i), manifest.digests[i]));
    }
    Found strays;
    for (const ListedObject& file : found.files) {
      if (!named.contains(file.key) && !IsYoung(file.modified)) strays.files.push_back(file);
    }
    for (const ListedUpload& upload : found.uploads) {
      if (!IsYoung(upload.begun)) strays.uploads.push_back(upload);
    }
    if (strays.files.empty() && strays.uploads.empty()) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::unique_ptr<SweepMark> mark, Mark(id));
    if (mark == nullptr) return absl::OkStatus();
    if (!options_.dry_run) RETURN_IF_ERROR(RemoveAll(bucket_, *mark, id, strays));
    Count(strays);
    return absl::OkStatus();
  }

  // A name whose manifest went: of a removal by a server that was interrupted in another order.
  absl::Status SweepName(const std::string& id, const BoundName& name) {
    if (IsYoung(name.modified)) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::unique_ptr<SweepMark> mark, Mark(id));
    if (mark == nullptr) return absl::OkStatus();
    if (!absl::IsNotFound(bucket_.ReadManifest(id).status())) return absl::OkStatus();
    if (!options_.dry_run) {
      RETURN_IF_ERROR(
          bucket_.client().Remove(bucket_.NameKey(name.name), Condition::IfMatch(name.etag)));
    }
    ++swept_.names;
    return absl::OkStatus();
  }

  absl::Status SweepRecords() {
    return bucket_.client().ForEach(
        bucket_.Folder("pushes"), [&](const ListedObject& record) -> absl::Status {
          ASSIGN_OR_RETURN(const bool live, IsLive(bucket_, record, options_.grace));
          if (live) return absl::OkStatus();
          ++swept_.records;
          return options_.dry_run ? absl::OkStatus() : bucket_.client().Remove(record.key);
        });
  }

  const Bucket& bucket_;
  const SweepOptions options_;
  std::map<std::string, Found> found_;      // by context id
  std::map<std::string, BoundName> bound_;  // by context id
  Swept swept_;
};

}  // namespace

absl::StatusOr<Removed> RemoveContext(const Bucket& bucket, const std::string& name) {
  ASSIGN_OR_RETURN(const BoundName bound, bucket.ReadName(name));
  Removed removed{.content_id = bound.content_id, .bytes = bound.bytes};
  RETURN_IF_ERROR(bucket.client().Remove(bucket.NameKey(name), Condition::IfMatch(bound.etag)));
  ASSIGN_OR_RETURN(const std::unique_ptr<SweepMark> mark,
                   SweepMark::Take(bucket, bound.context_id, absl::ZeroDuration()));
  if (mark == nullptr) {
    removed.files_stay = true;
    return removed;
  }
  ASSIGN_OR_RETURN(const bool again, IsBound(bucket, bound.context_id));
  if (again) {  // pushed once more meanwhile
    removed.files_stay = true;
    return removed;
  }
  const std::string& id = bound.context_id;
  ASSIGN_OR_RETURN(auto found, LookInto(bucket, bucket.ContextFolder(id)));
  RETURN_IF_ERROR(RemoveAll(bucket, *mark, id, found[id]));
  return removed;
}

absl::StatusOr<Swept> CollectGarbage(const Bucket& bucket, const SweepOptions& options) {
  return Sweeper(bucket, options).Run();
}

}  // namespace carrel::kvstore
