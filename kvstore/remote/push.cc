#include "kvstore/remote/push.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/hmac.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kvstore/format/context_name.h"
#include "kvstore/format/manifest.h"
#include "kvstore/storage/context_stream.h"

namespace carrel::kvstore {
namespace {

std::string Base64Sha256Of(absl::string_view bytes) {
  return absl::Base64Escape(absl::HexStringToBytes(Sha256Hex(bytes)));
}

// Whether the server's part has these bytes, by its SHA-256, or where the server keeps none by the MD5 in
// its tag. What cannot be told is sent again.
bool IsSame(const ListedPart& part, absl::string_view bytes) {
  if (part.size != static_cast<int64_t>(bytes.size())) return false;
  if (!part.sha256.empty()) return part.sha256 == Base64Sha256Of(bytes);
  return absl::StrContains(part.etag, Md5Hex(bytes));
}

// An upload of the key that somebody began and that is not over; or a new one.
absl::StatusOr<std::string> FindOrBegin(S3Client& client, const std::string& key) {
  ASSIGN_OR_RETURN(const std::vector<ListedUpload> uploads, client.ListUploads(key));
  for (const ListedUpload& upload : uploads) {
    if (upload.key == key) return upload.id;
  }
  return client.BeginUpload(key);
}

absl::Status UploadParts(S3Client& client, const std::string& key, absl::string_view bytes,
                         const std::function<void(int64_t)>& sent, int64_t part_bytes) {
  ASSIGN_OR_RETURN(const std::string upload, FindOrBegin(client, key));
  ASSIGN_OR_RETURN(const std::vector<ListedPart> listed, client.ListParts(key, upload));
  std::map<int, const ListedPart*> there;
  for (const ListedPart& part : listed) there[part.number] = &part;
  std::vector<UploadedPart> parts;
  const auto size = static_cast<int64_t>(bytes.size());
  for (int64_t begin = 0; begin < size; begin += part_bytes) {
    const int number = static_cast<int>(parts.size()) + 1;
    const absl::string_view part =
        bytes.substr(static_cast<size_t>(begin), static_cast<size_t>(part_bytes));
    const auto known = there.find(number);
    if (known != there.end() && IsSame(*known->second, part)) {
      parts.push_back(
          {.number = number, .etag = known->second->etag, .sha256 = Base64Sha256Of(part)});
      continue;
    }
    ASSIGN_OR_RETURN(UploadedPart uploaded, client.UploadPart(key, upload, number, part));
    parts.push_back(std::move(uploaded));
    sent(static_cast<int64_t>(part.size()));
  }
  return client.CompleteUpload(key, upload, parts);
}

absl::Status NameIsTaken(const Bucket& bucket, const BoundName& there) {
  return absl::AlreadyExistsError(absl::StrCat(
      bucket.client().UriOf(bucket.NameKey(there.name)), ": the name is bound to content id ",
      there.content_id, "; choose another name, or remove it first"));
}

// The manifest of a context that lost its name goes, unless somebody else pushes it, too.
absl::Status Withdraw(const Bucket& bucket, const std::string& id) {
  ASSIGN_OR_RETURN(const std::unique_ptr<SweepMark> mark,
                   SweepMark::Take(bucket, id, absl::ZeroDuration()));
  if (mark == nullptr) return absl::OkStatus();
  const absl::StatusOr<BucketManifest> manifest = bucket.ReadManifest(id);
  if (!manifest.ok()) return absl::OkStatus();
  const absl::StatusOr<BoundName> name = bucket.ReadName(manifest->header.name);
  if (name.ok() && name->context_id == id) return absl::OkStatus();
  RETURN_IF_ERROR(mark->Holds());
  return bucket.client().Remove(bucket.ManifestKey(id));
}

}  // namespace

absl::Status UploadFile(S3Client& client, const std::string& key, absl::string_view bytes,
                        const std::string& sha256, const std::function<void(int64_t)>& sent,
                        int64_t part_bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  CARREL_CHECK(part_bytes >= kLeastPartBytes);
  if (size <= part_bytes) {
    RETURN_IF_ERROR(client.Put(key, bytes, Condition::None(), sha256).status());
    sent(size);
    return absl::OkStatus();
  }
  part_bytes = std::max(part_bytes, (size + kMostParts - 1) / kMostParts);
  for (int attempt = 0;; ++attempt) {
    const absl::Status status = UploadParts(client, key, bytes, sent, part_bytes);
    // Somebody who sent the same file completed the upload, or it was swept.
    if (!status.ok() && !absl::IsNotFound(status)) return status;
    const absl::StatusOr<ObjectInfo> info = client.Head(key);
    if (info.ok() && info->size == size) return absl::OkStatus();
    if (info.ok()) {
      return absl::DataLossError(
          absl::StrCat(client.UriOf(key), " has ", info->size, " bytes, ", size, " were sent"));
    }
    if (!absl::IsNotFound(info.status()) || attempt == 2) return info.status();
  }
}

absl::Status Pusher::CheckName(const Bucket& bucket, const std::string& name,
                               const std::string& content_id) {
  const absl::StatusOr<BoundName> there = bucket.ReadName(name);
  if (absl::IsNotFound(there.status())) return absl::OkStatus();
  RETURN_IF_ERROR(there.status());
  if (!content_id.empty() && there->content_id == content_id) return absl::OkStatus();
  return NameIsTaken(bucket, *there);
}

absl::StatusOr<std::unique_ptr<Pusher>> Pusher::Begin(const Bucket& bucket, ContextId id,
                                                      const PushOptions& options) {
  if (id.is_number()) {
    return absl::FailedPreconditionError(
        absl::StrCat("context ", id.ToString(), " is of an older format: carrel upgrade binds it"));
  }
  std::unique_ptr<Pusher> pusher(new Pusher(bucket, id.ToString(), options));
  ASSIGN_OR_RETURN(pusher->record_, PushRecord::Place(bucket, pusher->id_, options.renew_every));
  ASSIGN_OR_RETURN(pusher->there_, bucket.FileSizes(pusher->id_));
  for (int i = 0; i < options.threads; ++i) {
    pusher->threads_.emplace_back([p = pusher.get()] { p->Run(); });
  }
  return pusher;
}

Pusher::~Pusher() {
  {
    absl::MutexLock lock(&mu_);
    ended_ = true;
    waiting_.clear();
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::Status Pusher::Still() const {
  return options_.still == nullptr ? absl::OkStatus() : options_.still();
}

absl::Status Pusher::AddFile(int64_t file, absl::string_view bytes, const std::string& sha256,
                             std::shared_ptr<const void> keep) {
  RETURN_IF_ERROR(Still());
  digests_[file] = sha256;
  const std::string key = bucket_.FileKey(id_, file, sha256);
  const auto known = there_.find(key);
  const bool there = known != there_.end() && known->second == static_cast<int64_t>(bytes.size());
  absl::MutexLock lock(&mu_);
  if (there) return status_;
  const auto room = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return waiting_.size() < static_cast<size_t>(options_.threads) || !status_.ok();
  };
  mu_.Await(absl::Condition(&room));
  if (status_.ok()) waiting_.push_back({key, bytes, sha256, std::move(keep)});
  return status_;
}

void Pusher::Run() {
  for (;;) {
    File file;
    {
      absl::MutexLock lock(&mu_);
      const auto work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return ended_ || !waiting_.empty();
      };
      mu_.Await(absl::Condition(&work));
      if (waiting_.empty()) return;
      file = std::move(waiting_.front());
      waiting_.pop_front();
      ++sending_;
    }
    const absl::Status sent = CatchThrown("sending", [&] {
      return UploadFile(
          bucket_.client(), file.key, file.bytes, file.sha256,
          [this](int64_t bytes) { sent_ += bytes; },
          options_.part_bytes > 0 ? options_.part_bytes : kUploadPartBytes);
    });
    absl::MutexLock lock(&mu_);
    --sending_;
    status_.Update(sent);
    if (!status_.ok()) waiting_.clear();
  }
}

absl::Status Pusher::Drain() {
  absl::MutexLock lock(&mu_);
  const auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return waiting_.empty() && sending_ == 0;
  };
  mu_.Await(absl::Condition(&done));
  return status_;
}

// As the bucket has them now, not as we remember it.
absl::Status Pusher::CheckAllThere(const BucketManifest& manifest) {
  ASSIGN_OR_RETURN(there_, bucket_.FileSizes(id_));
  for (size_t i = 0; i < manifest.digests.size(); ++i) {
    const std::string key = bucket_.FileKey(id_, static_cast<int64_t>(i), manifest.digests[i]);
    const auto known = there_.find(key);
    if (known == there_.end() || known->second != manifest.header.file_bytes[i]) {
      return absl::AbortedError(
          absl::StrCat(bucket_.client().UriOf(key), ": ",
                       known == there_.end() ? "it is not there any more" : "it has another size",
                       "; the same command sends what is missing"));
    }
  }
  return absl::OkStatus();
}

absl::Status Pusher::PublishManifest(const BucketManifest& manifest) {
  const absl::Status put =
      bucket_.client()
          .Put(bucket_.ManifestKey(id_), manifest.Encode(), Condition::Absent())
          .status();
  if (!absl::IsAlreadyExists(put)) return put;
  ASSIGN_OR_RETURN(const BucketManifest there, bucket_.ReadManifest(id_));
  if (there.ContentId() != manifest.ContentId() || there.digests != manifest.digests) {
    return absl::AlreadyExistsError(absl::StrCat(
        bucket_.client().UriOf(bucket_.ManifestKey(id_)), ": context ", id_,
        " is there with content id ", there.ContentId(), ", this one has ", manifest.ContentId(),
        there.ContentId() == manifest.ContentId() ? " in other files" : ""));
  }
  if (there.header.name == manifest.header.name) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(bucket_.client().UriOf(bucket_.ManifestKey(id_)),
                                               ": the context is there as \"", there.header.name,
                                               "\", a context has one name"));
}

absl::Status Pusher::BindName(const BucketManifest& manifest, bool* was_there) {
  BoundName name{.name = manifest.header.name,
                 .context_id = id_,
                 .content_id = manifest.ContentId(),
                 .files = static_cast<int64_t>(manifest.digests.size()),
                 .bytes = manifest.bytes()};
  v1::Manifest described;
  if (described.ParseFromString(manifest.header.manifest)) name.tokens = described.tokens();
  for (int attempt = 0;; ++attempt) {
    const absl::Status put =
        bucket_.client()
            .Put(bucket_.NameKey(name.name), name.Encode(), Condition::Absent())
            .status();
    if (!absl::IsAlreadyExists(put)) return put;
    const absl::StatusOr<BoundName> there = bucket_.ReadName(name.name);
    if (absl::IsNotFound(there.status()) && attempt < 10) continue;  // freed meanwhile
    RETURN_IF_ERROR(there.status());
    *was_there = there->content_id == name.content_id;
    return *was_there ? absl::OkStatus() : NameIsTaken(bucket_, *there);
  }
}

absl::StatusOr<Pushed> Pusher::Publish(const std::string& name, StreamHeader header) {
  RETURN_IF_ERROR(ValidateContextName(name));
  header.name = name;
  BucketManifest manifest{.header = std::move(header), .digests = {}};
  for (const auto& [file, digest] : digests_) manifest.digests.push_back(digest);
  CARREL_CHECK(manifest.digests.size() == manifest.header.file_bytes.size());
  RETURN_IF_ERROR(Drain());
  Pushed pushed{.content_id = manifest.ContentId(), .bytes = manifest.bytes()};
  RETURN_IF_ERROR(CheckAllThere(manifest));
  RETURN_IF_ERROR(record_->Held());
  RETURN_IF_ERROR(Still());
  RETURN_IF_ERROR(PublishManifest(manifest));
  RETURN_IF_ERROR(record_->Held());
  absl::Status bound = Still();
  const bool given_up = !bound.ok();
  if (!given_up) bound = BindName(manifest, &pushed.was_there);
  if (absl::IsAlreadyExists(bound) || given_up) {
    record_ = nullptr;
    (void)Withdraw(bucket_, id_);  // what it does not reach, gc does
  }
  RETURN_IF_ERROR(bound);
  pushed.sent_bytes = sent_;
  return pushed;
}

absl::StatusOr<Pushed> PushContext(const Bucket& bucket, ContextExport& from,
                                   const std::string& name,
                                   const std::function<void(int64_t, int64_t)>& progress,
                                   const PushOptions& options) {
  const std::string as = name.empty() ? from.manifest().name() : name;
  RETURN_IF_ERROR(Pusher::CheckName(bucket, as, from.manifest().content_id()));
  ASSIGN_OR_RETURN(const ContextId id, ContextIdOf(from.manifest()));
  ASSIGN_OR_RETURN(const std::unique_ptr<Pusher> pusher, Pusher::Begin(bucket, id, options));
  int64_t done = 0;
  for (int64_t file = 0; file < from.files(); ++file) {
    std::string sha256;
    RETURN_IF_ERROR(from.VerifyFile(file, &sha256));
    done += static_cast<int64_t>(from.File(file).size());
    progress(done, from.bytes());
    RETURN_IF_ERROR(pusher->AddFile(file, from.File(file), sha256, nullptr));
  }
  return pusher->Publish(as, from.header());
}

}  // namespace carrel::kvstore
