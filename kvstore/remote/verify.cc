#include "kvstore/remote/verify.h"

#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

absl::StatusOr<std::string> DigestOfObject(S3Client& client, const std::string& key,
                                           int64_t* bytes_read) {
  Sha256 sha;
  RETURN_IF_ERROR(client
                      .Get(key, {},
                           [&](absl::string_view bytes) {
                             sha.Update(bytes);
                             *bytes_read += static_cast<int64_t>(bytes.size());
                             return absl::OkStatus();
                           })
                      .status());
  return sha.FinishHex();
}

bool IsAboutTheContext(const absl::Status& status) {
  return absl::IsDataLoss(status) || absl::IsNotFound(status) || absl::IsFailedPrecondition(status);
}

}  // namespace

absl::StatusOr<Verified> VerifyInBucket(const Bucket& bucket, const std::string& name, bool deep,
                                        const std::function<void(double)>& progress) {
  Verified verified;
  ASSIGN_OR_RETURN(const BoundName bound, bucket.ReadName(name));
  verified.content_id = bound.content_id;
  const absl::StatusOr<BucketManifest> manifest = bucket.ReadManifestOf(bound);
  if (!manifest.ok() && IsAboutTheContext(manifest.status())) {
    verified.errors.emplace_back(manifest.status().message());
    return verified;
  }
  RETURN_IF_ERROR(manifest.status());
  ASSIGN_OR_RETURN(const auto there, bucket.FileSizes(bound.context_id));
  for (size_t i = 0; i < manifest->digests.size(); ++i) {
    const std::string key =
        bucket.FileKey(bound.context_id, static_cast<int64_t>(i), manifest->digests[i]);
    const std::string uri = bucket.client().UriOf(key);
    const auto object = there.find(key);
    ++verified.files;
    if (object == there.end()) {
      verified.errors.push_back(uri + " is not there");
    } else if (object->second != manifest->header.file_bytes[i]) {
      verified.errors.push_back(absl::StrCat(uri, " has ", object->second,
                                             " bytes, the manifest says ",
                                             manifest->header.file_bytes[i]));
    } else if (deep) {
      const absl::StatusOr<std::string> digest =
          DigestOfObject(bucket.client(), key, &verified.bytes_read);
      if (!digest.ok() && !IsAboutTheContext(digest.status())) return digest.status();
      if (!digest.ok()) {
        verified.errors.emplace_back(digest.status().message());
      } else if (*digest != manifest->digests[i]) {
        verified.errors.push_back(absl::StrCat(uri, " has the SHA-256 ", *digest));
      }
    }
    if (progress != nullptr) {
      progress(static_cast<double>(i + 1) / static_cast<double>(manifest->digests.size()));
    }
  }
  return verified;
}

}  // namespace carrel::kvstore
