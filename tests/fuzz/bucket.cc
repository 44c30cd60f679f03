// What a bucket brings: replies of an object store, and objects that others may have written there
// (kvstore/remote). The digest of a manifest is put right, so that what it covers is looked at.
#include "kvstore/remote/bucket.h"

#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "kvstore/remote/s3_replies.h"
#include "tests/fuzz/target.h"

namespace carrel::fuzz {
namespace {

using namespace carrel::kvstore;  // NOLINT: all of this file is about it

void RunReply(absl::string_view bytes) {
  const S3Error error = ReadS3Error(bytes);
  CARREL_FUZZ_CHECK(error.message.size() < 2000 && error.code.size() < 1000);
  if (const auto page = ReadObjectPage(bytes); page.ok()) {
    for (const ListedObject& object : page->objects) {
      CARREL_FUZZ_CHECK(!object.key.empty() && object.size >= 0);
    }
  }
  if (const auto page = ReadUploadPage(bytes); page.ok()) {
    for (const ListedUpload& upload : page->uploads) CARREL_FUZZ_CHECK(!upload.id.empty());
  }
  if (const auto page = ReadPartPage(bytes); page.ok()) {
    for (const ListedPart& part : page->parts) {
      CARREL_FUZZ_CHECK(part.number >= 0 && part.number <= 10'000);
    }
  }
  if (const auto id = ReadUploadId(bytes); id.ok()) CARREL_FUZZ_CHECK(!id->empty());
  if (const auto role = ReadAssumedRole(bytes); role.ok()) {
    CARREL_FUZZ_CHECK(!role->secret_key.empty());
  }
  (void)ReadHttpDate(bytes);
  (void)BoundName::Decode("name", bytes, "names/name");
  if (const auto address = BucketAddress::Parse(bytes); address.ok()) {
    CARREL_FUZZ_CHECK(address->prefix.empty() || address->prefix.back() == '/');
  }
}

std::vector<std::string> ReplySeeds() {
  const std::string time = "<LastModified>2009-10-12T17:50:30.000Z</LastModified>";
  return {
      "<?xml version=\"1.0\"?><Error><Code>RequestTimeTooSkewed</Code><Message>m</Message>"
      "<RequestTime>a</RequestTime><ServerTime>b</ServerTime></Error>",
      absl::StrCat("<ListBucketResult xmlns=\"x\"><IsTruncated>true</IsTruncated>"
                   "<NextContinuationToken>t</NextContinuationToken><Contents><Key>a&amp;b</Key>",
                   time,
                   "<ETag>&quot;e&quot;</ETag><Size>4</Size></Contents>"
                   "<CommonPrefixes><Prefix>p/</Prefix></CommonPrefixes></ListBucketResult>"),
      "<ListMultipartUploadsResult><Upload><Key>k</Key><UploadId>u</UploadId>"
      "<Initiated>2010-11-10T20:48:33.000Z</Initiated></Upload></ListMultipartUploadsResult>",
      "<ListPartsResult><Part><PartNumber>2</PartNumber><ETag>e</ETag><Size>10</Size>"
      "</Part></ListPartsResult>",
      "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
      "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
      "<AccessKeyId>a</AccessKeyId><SecretAccessKey>b</SecretAccessKey><SessionToken>c</"
      "SessionToken>"
      "<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>"
      "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>",
      absl::StrCat("{\"context_id\":\"", std::string(32, 'a'), "\",\"content_id\":\"",
                   std::string(64, 'b'), "\",\"files\":1,\"bytes\":2,\"tokens\":3}"),
      "s3://bucket/a/b",
      "Fri, 24 May 2013 00:00:00 GMT"};
}

void RunBucketManifest(absl::string_view bytes) {
  std::string object(bytes);
  if (object.size() >= 32) {
    const absl::string_view proven = absl::string_view(object).substr(0, object.size() - 32);
    object.replace(proven.size(), 32, absl::HexStringToBytes(Sha256Hex(proven)));
  }
  const auto manifest = BucketManifest::Decode(object, "manifest");
  if (!manifest.ok()) return;
  CARREL_FUZZ_CHECK(manifest->digests.size() == manifest->header.file_bytes.size());
  CARREL_FUZZ_CHECK(manifest->bytes() >= 0);
  CARREL_FUZZ_CHECK(BucketManifest::Decode(manifest->Encode(), "again").ok());
  (void)manifest->Id();
}

std::vector<std::string> BucketManifestSeeds() {
  return {BucketManifest{.header = {.name = "n", .manifest = "", .file_bytes = {1, 2}},
                         .digests = {std::string(64, 'a'), std::string(64, 'b')}}
              .Encode()};
}

CARREL_FUZZ_TARGET(bucket_manifest, RunBucketManifest, BucketManifestSeeds);
CARREL_FUZZ_TARGET(bucket_reply, RunReply, ReplySeeds);

}  // namespace
}  // namespace carrel::fuzz
