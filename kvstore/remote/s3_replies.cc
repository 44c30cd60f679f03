#include "kvstore/remote/s3_replies.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/shown.h"
#include "common/status.h"
#include "kvstore/remote/xml.h"

namespace carrel::kvstore {
namespace {

constexpr size_t kMostKeyBytes = 1024;
constexpr int64_t kMostObjectBytes = int64_t{1} << 50;

absl::Status Missing(absl::string_view reply, absl::string_view element) {
  return absl::DataLossError(absl::StrCat("the ", reply, " has no ", element));
}

// other: what some servers call it.
absl::StatusOr<XmlElement> Root(absl::string_view body, absl::string_view name,
                                absl::string_view other = "") {
  ASSIGN_OR_RETURN(XmlElement root, ParseXml(body, absl::StrCat("the ", name)));
  if (root.name != name && (other.empty() || root.name != other)) {
    return absl::DataLossError(
        absl::StrCat("a ", name, " was expected, the reply is a ", Shown(root.name)));
  }
  return root;
}

absl::StatusOr<int64_t> Number(const XmlElement& element, absl::string_view name, int64_t most) {
  int64_t value = 0;
  const absl::string_view text = element.Text(name);
  if (!absl::SimpleAtoi(text, &value) || value < 0 || value > most) {
    return absl::DataLossError(
        absl::StrCat("the reply has ", name, "=\"", Shown(text), "\", must be 0 to ", most));
  }
  return value;
}

absl::StatusOr<std::string> Key(const XmlElement& element, absl::string_view reply) {
  const absl::string_view key = element.Text("Key");
  if (key.empty() || key.size() > kMostKeyBytes) {
    return absl::DataLossError(absl::StrCat("the ", reply, " has a key of ", key.size(),
                                            " bytes, must be 1 to ", kMostKeyBytes));
  }
  return std::string(key);
}

// Quotes are part of a tag; some servers leave them out.
std::string Etag(absl::string_view text) { return std::string(text); }

// More to come: the marker, which must be there.
absl::Status Next(const XmlElement& root, absl::string_view marker, std::string& next) {
  if (root.Text("IsTruncated") != "true") return absl::OkStatus();
  next = std::string(root.Text(marker));
  return next.empty() ? Missing(root.name, marker) : absl::OkStatus();
}

}  // namespace

S3Error ReadS3Error(absl::string_view body) {
  S3Error error;
  const absl::StatusOr<XmlElement> root = ParseXml(body, "error");
  const XmlElement* element = root.ok() ? &*root : nullptr;
  if (element != nullptr && element->name == "ErrorResponse") element = element->Find("Error");
  if (element == nullptr || element->name != "Error") {
    error.message = Shown(body, 200);
    return error;
  }
  error.code = Shown(element->Text("Code"), 80);
  error.message = Shown(element->Text("Message"), 300);
  error.request_time = Shown(element->Text("RequestTime"), 40);
  error.server_time = Shown(element->Text("ServerTime"), 40);
  error.region = Shown(element->Text("Region"), 40);
  return error;
}

absl::StatusOr<ObjectPage> ReadObjectPage(absl::string_view body) {
  ASSIGN_OR_RETURN(const XmlElement root, Root(body, "ListBucketResult"));
  ObjectPage page;
  for (const XmlElement& child : root.children) {
    if (child.name == "CommonPrefixes") page.prefixes.emplace_back(child.Text("Prefix"));
    if (child.name != "Contents") continue;
    ListedObject object;
    ASSIGN_OR_RETURN(object.key, Key(child, "list"));
    ASSIGN_OR_RETURN(object.size, Number(child, "Size", kMostObjectBytes));
    ASSIGN_OR_RETURN(object.modified, ReadIsoTime(child.Text("LastModified"), "the list"));
    object.etag = Etag(child.Text("ETag"));
    page.objects.push_back(std::move(object));
  }
  RETURN_IF_ERROR(Next(root, "NextContinuationToken", page.next));
  return page;
}

absl::StatusOr<UploadPage> ReadUploadPage(absl::string_view body) {
  ASSIGN_OR_RETURN(const XmlElement root, Root(body, "ListMultipartUploadsResult"));
  UploadPage page;
  for (const XmlElement& child : root.children) {
    if (child.name != "Upload") continue;
    ListedUpload upload;
    ASSIGN_OR_RETURN(upload.key, Key(child, "list of uploads"));
    upload.id = std::string(child.Text("UploadId"));
    if (upload.id.empty()) return Missing("list of uploads", "UploadId");
    ASSIGN_OR_RETURN(upload.begun, ReadIsoTime(child.Text("Initiated"), "the list of uploads"));
    page.uploads.push_back(std::move(upload));
  }
  RETURN_IF_ERROR(Next(root, "NextKeyMarker", page.next_key));
  page.next_id = std::string(root.Text("NextUploadIdMarker"));
  if (page.next_key.empty()) page.next_id.clear();
  return page;
}

absl::StatusOr<PartPage> ReadPartPage(absl::string_view body) {
  ASSIGN_OR_RETURN(const XmlElement root, Root(body, "ListPartsResult", "ListPartsResponse"));
  PartPage page;
  for (const XmlElement& child : root.children) {
    if (child.name != "Part") continue;
    ListedPart part;
    ASSIGN_OR_RETURN(const int64_t number, Number(child, "PartNumber", 10'000));
    part.number = static_cast<int>(number);
    ASSIGN_OR_RETURN(part.size, Number(child, "Size", kMostObjectBytes));
    part.etag = Etag(child.Text("ETag"));
    part.sha256 = std::string(child.Text("ChecksumSHA256"));
    page.parts.push_back(std::move(part));
  }
  RETURN_IF_ERROR(Next(root, "NextPartNumberMarker", page.next));
  return page;
}

absl::StatusOr<std::string> ReadUploadId(absl::string_view body) {
  ASSIGN_OR_RETURN(const XmlElement root, Root(body, "InitiateMultipartUploadResult"));
  const absl::string_view id = root.Text("UploadId");
  if (id.empty()) return Missing("begin of an upload", "UploadId");
  return std::string(id);
}

absl::StatusOr<Credentials> ReadAssumedRole(absl::string_view body) {
  ASSIGN_OR_RETURN(const XmlElement root, Root(body, "AssumeRoleWithWebIdentityResponse"));
  const XmlElement* const result = root.Find("AssumeRoleWithWebIdentityResult");
  const XmlElement* const found = result == nullptr ? nullptr : result->Find("Credentials");
  if (found == nullptr) return Missing("assumed role", "Credentials");
  Credentials credentials;
  credentials.access_key = std::string(found->Text("AccessKeyId"));
  credentials.secret_key = std::string(found->Text("SecretAccessKey"));
  credentials.session_token = std::string(found->Text("SessionToken"));
  if (credentials.access_key.empty()) return Missing("assumed role", "AccessKeyId");
  if (credentials.secret_key.empty()) return Missing("assumed role", "SecretAccessKey");
  ASSIGN_OR_RETURN(credentials.expires, ReadIsoTime(found->Text("Expiration"), "the assumed role"));
  return credentials;
}

absl::StatusOr<absl::Time> ReadIsoTime(absl::string_view text, absl::string_view where) {
  absl::Time time;
  std::string error;
  if (!absl::ParseTime(absl::RFC3339_full, text, &time, &error)) {
    return absl::DataLossError(absl::StrCat(where, " has the time \"", Shown(text),
                                            "\", must be as 2013-05-24T00:00:00Z"));
  }
  return time;
}

std::optional<absl::Time> ReadHttpDate(absl::string_view text) {
  absl::Time time;
  std::string error;
  if (!absl::ParseTime("%a, %d %b %Y %H:%M:%S GMT", text, &time, &error)) return std::nullopt;
  return time;
}

}  // namespace carrel::kvstore
