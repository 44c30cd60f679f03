// What:   how contexts lie in a bucket, and what is read of them.
// Bytes:  below the prefix:
//           names/NAME                     a JSON object (bound_name): which context the name is bound to
//           contexts/ID/manifest           BucketManifest: it makes the context visible
//           contexts/ID/NNNN-SHA256.sst    file NNNN of the context, in order of keys
//           pushes/ID/PUSHER               somebody sends the context's files (push.h)
//           sweeps/ID                      somebody removes them (sweep.h)
//         ID is the context's id, which is known before its content is; a file's key holds its SHA-256, so
//         that no file is ever replaced by another, whoever sends. docs/formats.md.
// Errors: as s3_client.h; NotFound no such name; DataLoss an object that does not add up (names it).
// Threads: any.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvstore/format/context_id.h"
#include "kvstore/remote/s3_client.h"
#include "kvstore/storage/context_stream.h"

namespace carrel::kvstore {

// s3://BUCKET[/PREFIX]. InvalidArgument names it.
struct BucketAddress {
  std::string bucket;
  std::string prefix;                         // empty, or ends with '/'
  static bool IsOne(absl::string_view text);  // begins with s3://
  static absl::StatusOr<BucketAddress> Parse(absl::string_view text);
};

// A context as the bucket has it: the header of its stream and the SHA-256 of its files.
struct BucketManifest {
  StreamHeader header;
  std::vector<std::string> digests;  // 64 lower-case digits each

  // "CARRELBK", version u32 = 1, reserved u32 = 0, bytes of the header u64, the header, 32 bytes of each
  // digest, SHA-256 of all of it so far.
  std::string Encode() const;
  static absl::StatusOr<BucketManifest> Decode(absl::string_view bytes, absl::string_view where);
  std::string ContentId() const;
  absl::StatusOr<ContextId> Id() const;
  int64_t bytes() const;  // of all files
};

// What a name is bound to, and what a list shows of it.
struct BoundName {
  std::string name;
  std::string context_id, content_id;  // hexadecimal digits
  int64_t files = 0, bytes = 0, tokens = 0;
  std::string etag;     // of the name's object
  absl::Time modified;  // by the server's clock

  std::string Encode() const;
  static absl::StatusOr<BoundName> Decode(const std::string& name, absl::string_view json,
                                          absl::string_view where);
};

class Bucket {
 public:
  Bucket(std::unique_ptr<S3Client> client, std::string prefix)
      : client_(std::move(client)), prefix_(std::move(prefix)) {}

  S3Client& client() const { return *client_; }

  std::string NameKey(absl::string_view name) const;
  std::string ContextFolder(absl::string_view id) const;  // ends with '/'
  std::string ManifestKey(absl::string_view id) const;
  std::string FileKey(absl::string_view id, int64_t file, absl::string_view sha256) const;
  std::string PushFolder(absl::string_view id) const;
  std::string SweepKey(absl::string_view id) const;
  // "contexts/", "names/", .. of the prefix.
  std::string Folder(absl::string_view folder) const;

  absl::StatusOr<BoundName> ReadName(const std::string& name) const;
  // What cannot be read is appended to `unreadable`. known: by name, as read before: those whose objects have the
  // same ETag still are not read again, so that a look at many names is a list; null: none.
  absl::StatusOr<std::vector<BoundName>> ListNames(
      std::vector<absl::Status>* unreadable,
      const std::map<std::string, BoundName>* known = nullptr) const;
  // Of what lies under a context's id: keys and sizes.
  absl::StatusOr<std::map<std::string, int64_t>> FileSizes(absl::string_view id) const;
  // NotFound: none, or not any more.
  absl::StatusOr<BucketManifest> ReadManifest(const std::string& id) const;
  // Of a name: also that it is the manifest that the name is bound to.
  absl::StatusOr<BucketManifest> ReadManifestOf(const BoundName& name) const;

 private:
  const std::unique_ptr<S3Client> client_;
  const std::string prefix_;
};

}  // namespace carrel::kvstore
