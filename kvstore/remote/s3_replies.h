// What:   what S3 and STS say, read out of their replies: errors, lists, uploads, temporary credentials.
// Source: Amazon S3 API reference, the replies of ListObjectsV2, ListMultipartUploads, ListParts,
//         CreateMultipartUpload; STS API reference, AssumeRoleWithWebIdentity; RFC 9110 for dates.
// Errors: DataLoss names the reply and the element that is missing or out of bounds.
// Threads: any.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvstore/remote/signature.h"

namespace carrel::kvstore {

struct S3Error {
  std::string code;  // "NoSuchKey"; empty: the reply is no error of S3
  std::string message;
  std::string server_time;  // of RequestTimeTooSkewed
  std::string region;       // where the bucket is, if the server says it
};
// Never fails: what is no error of S3 has no code, and its beginning as the message.
S3Error ReadS3Error(absl::string_view body);

struct ListedObject {
  std::string key;
  int64_t size = 0;
  std::string etag;
  absl::Time modified;
};
struct ObjectPage {
  std::vector<ListedObject> objects;
  std::string next;  // token of the page to come; empty: this is the last
};
absl::StatusOr<ObjectPage> ReadObjectPage(absl::string_view body);

struct ListedUpload {
  std::string key, id;
  absl::Time begun;
};
struct UploadPage {
  std::vector<ListedUpload> uploads;
  std::string next_key, next_id;  // markers of the page to come; both empty: this is the last
};
absl::StatusOr<UploadPage> ReadUploadPage(absl::string_view body);

struct ListedPart {
  int number = 0;
  int64_t size = 0;
  std::string etag;
  std::string sha256;  // in base64; empty: the server keeps none
};
struct PartPage {
  std::vector<ListedPart> parts;
  std::string next;
};
absl::StatusOr<PartPage> ReadPartPage(absl::string_view body);

absl::StatusOr<std::string> ReadUploadId(absl::string_view body);
absl::StatusOr<Credentials> ReadAssumedRole(absl::string_view body);

// "2013-05-24T00:00:00.000Z"
absl::StatusOr<absl::Time> ReadIsoTime(absl::string_view text, absl::string_view where);
// "Fri, 24 May 2013 00:00:00 GMT"; nullopt: is no such.
std::optional<absl::Time> ReadHttpDate(absl::string_view text);

}  // namespace carrel::kvstore
