// What:   a context goes into a bucket: its files, then its manifest by one conditional PUT, then its name.
//         It is visible wholly or not at all; two who push do not mix; what was interrupted goes on.
// Errors: as s3_client.h and push_record.h; AlreadyExists the name is bound to another context, or the
//         context is in the bucket under another name (both named).
// Edge:   a context that is there already, under the name, is a success. After AlreadyExists of the name the
//         context is invisible again, and its files stay for an attempt under another name until they are
//         swept.
// Ownership: the bucket outlives a Pusher; the bytes of a file are kept by `keep` until they are sent.
// Threads: AddFile and Publish from one; files are sent by threads of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kvstore/remote/bucket.h"
#include "kvstore/remote/push_record.h"
#include "kvstore/storage/context_stream.h"

namespace carrel::kvstore {

struct PushOptions {
  int threads = 8;  // files on their way at once: a GPU computes faster than few connections send
  absl::Duration renew_every = kRenewEvery;
  int64_t part_bytes = 0;  // 0: kUploadPartBytes
  // Asked before each file, before the manifest and before the name: an error ends the push, and what was not
  // visible by then stays invisible. Null: nobody asks.
  std::function<absl::Status()> still;
};

struct Pushed {
  std::string content_id;
  int64_t bytes = 0;       // of all files
  int64_t sent_bytes = 0;  // of those that were not there
  bool was_there = false;  // under this name, before
};

class Pusher {
 public:
  // Before anything is computed or read: AlreadyExists unless the name is free, or bound to content_id
  // (empty: to none).
  static absl::Status CheckName(const Bucket& bucket, const std::string& name,
                                const std::string& content_id);
  static absl::StatusOr<std::unique_ptr<Pusher>> Begin(const Bucket& bucket, ContextId id,
                                                       const PushOptions& options = {});
  ~Pusher();  // what is not sent by then is not sent

  // File `file` of the context, in any order. Waits while many are on their way. Returns the first error
  // of what was added before.
  absl::Status AddFile(int64_t file, absl::string_view bytes, const std::string& sha256,
                       std::shared_ptr<const void> keep);
  // Once all files of the header were added. name: in the bucket.
  absl::StatusOr<Pushed> Publish(const std::string& name, StreamHeader header);
  int64_t sent_bytes() const { return sent_; }

 private:
  struct File {
    std::string key;
    absl::string_view bytes;
    std::string sha256;
    std::shared_ptr<const void> keep;
  };
  Pusher(const Bucket& bucket, std::string id, const PushOptions& options)
      : bucket_(bucket), id_(std::move(id)), options_(options) {}
  absl::Status Still() const;
  void Run();
  absl::Status Drain();
  absl::Status CheckAllThere(const BucketManifest& manifest);
  absl::Status PublishManifest(const BucketManifest& manifest);
  absl::Status BindName(const BucketManifest& manifest, bool* was_there);

  const Bucket& bucket_;
  const std::string id_;
  const PushOptions options_;
  std::unique_ptr<PushRecord> record_;
  std::map<std::string, int64_t> there_;  // Bucket::FileSizes
  std::map<int64_t, std::string> digests_;
  std::atomic<int64_t> sent_{0};
  absl::Mutex mu_;
  std::deque<File> waiting_ ABSL_GUARDED_BY(mu_);
  int sending_ ABSL_GUARDED_BY(mu_) = 0;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_;
};

// All of a stored context. progress: told bytes that are sent or there, and all.
absl::StatusOr<Pushed> PushContext(const Bucket& bucket, ContextExport& from,
                                   const std::string& name,
                                   const std::function<void(int64_t, int64_t)>& progress,
                                   const PushOptions& options = {});

inline constexpr int64_t kUploadPartBytes = int64_t{64} << 20;

// One file as one object: a PUT, or parts where it is large; parts of an upload that was interrupted are not sent
// again where the server says that they are the same bytes. The key names the bytes (their SHA-256), so that
// several who send the same file may share an upload. sha256: of the bytes, in hex; empty: it is computed here.
// part_bytes: at least kLeastPartBytes; more where the file would have too many. sent: told the bytes that were
// sent, part by part.
absl::Status UploadFile(S3Client& client, const std::string& key, absl::string_view bytes,
                        const std::string& sha256, const std::function<void(int64_t)>& sent,
                        int64_t part_bytes = kUploadPartBytes);

}  // namespace carrel::kvstore
