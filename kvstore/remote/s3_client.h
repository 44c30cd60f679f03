// What:   the objects of one bucket, over the S3 protocol.
// Source: Amazon S3 API reference. What is asked of a server: plain PUT with If-None-Match and If-Match,
//         ranges, ListObjectsV2, multipart uploads, x-amz-checksum-sha256.
// Errors: each names s3://BUCKET/KEY, the method and what the server said; never a secret, a token or a
//         signature. NotFound an object, a bucket; AlreadyExists, Aborted the condition of a PUT or
//         DELETE (kAbsent, IfMatch) does not hold; PermissionDenied; Unauthenticated credentials that are
//         not known, wrong or over; FailedPrecondition this machine's clock and the server's differ
//         (names both times), or the bucket is in another region (names it); DataLoss a reply that does
//         not hold together, or bytes that arrived as others; Unavailable, DeadlineExceeded after all
//         retries; Cancelled.
// Edge:   500, 502, 503, 504, 429, a connection that breaks and credentials that are over are tried
//         again (retry.h). A PUT with a condition that was tried again and finds the very bytes there
//         has succeeded.
// Ownership: what `cancelled` points to outlives the client.
// Threads: any; each call has a connection of its own meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvstore/remote/credentials_provider.h"
#include "kvstore/remote/http_client.h"
#include "kvstore/remote/retry.h"
#include "kvstore/remote/s3_replies.h"

namespace carrel::kvstore {

struct S3Config {
  std::string bucket;
  std::string endpoint;  // http[s]://HOST[:PORT]; empty: AWS's of the region
  std::string region = "us-east-1";
  // The bucket as the path's first part, or else as the host's.
  bool path_style = true;
  std::string ca_file;
  // At the server: "AES256" or "aws:kms", and the key's id; empty: as the bucket says.
  std::string encryption, encryption_key;
  RetryPolicy retry;

  absl::Status Validate() const;  // InvalidArgument names field and value
};

struct ObjectInfo {
  int64_t size = 0;  // of the whole object, also where a range was read
  std::string etag;
  absl::Time modified;     // by the server's clock
  absl::Time server_time;  // of the reply
};

// What must hold for a PUT or DELETE.
struct Condition {
  static Condition None() { return {}; }
  static Condition Absent() { return {.absent = true}; }
  static Condition IfMatch(std::string etag) { return {.etag = std::move(etag)}; }
  bool absent = false;
  std::string etag;
};

// Bytes of an object: [begin, end).
struct ObjectRange {
  int64_t begin = 0;
  int64_t end = -1;  // -1: all from begin on
};

struct UploadedPart {
  int number = 0;  // from 1 on
  std::string etag;
  std::string sha256;  // in base64
};
// All but the last part have at least so many bytes; at most so many parts.
inline constexpr int64_t kLeastPartBytes = int64_t{5} << 20;
inline constexpr int kMostParts = 10'000;

class S3Client {
 public:
  // cancelled: ends what runs and waits; or null.
  static absl::StatusOr<std::unique_ptr<S3Client>> Create(
      S3Config config, std::unique_ptr<CredentialsProvider> credentials,
      const std::atomic<bool>* cancelled = nullptr);

  const S3Config& config() const { return config_; }
  std::string UriOf(absl::string_view key) const;  // "s3://BUCKET/KEY", for messages

  // Now, by the server's clock, as its last reply told it (to the second); before any, by ours.
  absl::Time ServerNow() const;

  absl::StatusOr<ObjectInfo> Head(const std::string& key);
  // Gives the bytes in order; where a connection breaks, it goes on behind what was given, if the
  // object is the same. DataLoss: the object ends before the range does.
  absl::StatusOr<ObjectInfo> Get(const std::string& key, ObjectRange range,
                                 const std::function<absl::Status(absl::string_view)>& sink);
  // ResourceExhausted: it is larger. info: may be null.
  absl::StatusOr<std::string> Read(const std::string& key, int64_t most_bytes,
                                   ObjectInfo* info = nullptr);
  // Returns the etag. The server holds the bytes against their SHA-256, in hex; empty: it is computed here.
  absl::StatusOr<std::string> Put(const std::string& key, absl::string_view bytes,
                                  const Condition& condition = Condition::None(),
                                  const std::string& sha256 = "");
  // OK, too, where there is no such object. A server that knows no conditions of DELETE is asked
  // without.
  absl::Status Remove(const std::string& key, const Condition& condition = Condition::None());

  // Keys in order. token: of the page before; empty: the first.
  absl::StatusOr<ObjectPage> List(const std::string& prefix, const std::string& token = "",
                                  int most = 1000);
  // All pages, with their objects; what `each` returns ends it.
  absl::Status ForEach(const std::string& prefix,
                       const std::function<absl::Status(const ListedObject&)>& each);

  // An object of many parts, invisible until it is complete. Never with a condition: completions of
  // several are not told apart by every server.
  absl::StatusOr<std::string> BeginUpload(const std::string& key);
  absl::StatusOr<UploadedPart> UploadPart(const std::string& key, const std::string& upload,
                                          int number, absl::string_view bytes);
  absl::Status CompleteUpload(const std::string& key, const std::string& upload,
                              const std::vector<UploadedPart>& parts);
  absl::Status AbortUpload(const std::string& key, const std::string& upload);
  absl::StatusOr<std::vector<ListedUpload>> ListUploads(const std::string& prefix);
  absl::StatusOr<std::vector<ListedPart>> ListParts(const std::string& key,
                                                    const std::string& upload);

 private:
  struct Operation;
  struct Outcome;
  S3Client(S3Config config, std::unique_ptr<CredentialsProvider> credentials,
           const std::atomic<bool>* cancelled);
  Outcome Attempt(const Operation& operation);
  absl::StatusOr<HttpReply> Call(Operation& operation);
  absl::Status Refusal(const Operation& operation, const HttpReply& reply,
                       const Credentials& credentials) const;
  void AddEncryption(NameValues& headers) const;

  const S3Config config_;
  const std::unique_ptr<CredentialsProvider> credentials_;
  const std::atomic<bool>* const cancelled_;
  std::string scheme_, host_;  // of the endpoint; the host has the bucket's name where it belongs
  HttpClient http_;
  std::atomic<int64_t> clock_offset_ms_;  // of the server's, from SteadyNow()
};

}  // namespace carrel::kvstore
