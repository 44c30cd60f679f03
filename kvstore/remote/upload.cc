#include "kvstore/remote/upload.h"

#include <algorithm>
#include <map>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "common/hmac.h"
#include "common/status.h"

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

}  // namespace carrel::kvstore
