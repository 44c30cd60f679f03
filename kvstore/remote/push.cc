#include "kvstore/remote/push.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kvstore/format/context_name.h"
#include "kvstore/format/manifest.h"
#include "kvstore/remote/upload.h"
#include "kvstore/storage/context_export.h"

namespace carrel::kvstore {
namespace {

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
  RETURN_IF_ERROR(pusher->LookAround());
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

absl::Status Pusher::LookAround() {
  there_.clear();
  return bucket_.client().ForEach(bucket_.ContextFolder(id_), [&](const ListedObject& object) {
    there_[object.key] = object.size;
    return absl::OkStatus();
  });
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
  RETURN_IF_ERROR(LookAround());
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
  // The header comes first, then each file and its digest.
  std::string encoded;
  int64_t wanted = 0;
  const auto next = [&from]() { return from.Next(); };
  for (;;) {
    ASSIGN_OR_RETURN(wanted, StreamHeader::BytesWanted(encoded));
    if (static_cast<int64_t>(encoded.size()) == wanted) break;
    ASSIGN_OR_RETURN(const absl::string_view piece, next());
    encoded.append(piece.data(), piece.size());
  }
  ASSIGN_OR_RETURN(StreamHeader header, StreamHeader::Decode(encoded));
  int64_t done = 0;
  for (size_t i = 0; i < header.file_bytes.size(); ++i) {
    for (int64_t left = header.file_bytes[i]; left > 0;) {
      ASSIGN_OR_RETURN(const absl::string_view piece, next());
      if (piece.empty()) return absl::DataLossError("push: the context ends before its files do");
      left -= static_cast<int64_t>(piece.size());
      done += static_cast<int64_t>(piece.size());
      progress(done, from.bytes());
    }
    std::string digest;
    while (static_cast<int64_t>(digest.size()) < kStreamDigestBytes) {
      ASSIGN_OR_RETURN(const absl::string_view piece, next());
      if (piece.empty()) return absl::DataLossError("push: the context ends before its digests do");
      digest.append(piece.data(), piece.size());
    }
    RETURN_IF_ERROR(pusher->AddFile(static_cast<int64_t>(i), from.File(static_cast<int64_t>(i)),
                                    absl::BytesToHexString(digest), nullptr));
  }
  return pusher->Publish(as, std::move(header));
}

}  // namespace carrel::kvstore
