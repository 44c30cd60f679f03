// What:   a context out of a bucket, as the stream that an import takes (context_stream.h): the manifest's
//         header, then each file and its digest. Files are read in ranges, several at once and a few ahead.
// Errors: as s3_client.h; NotFound no such name, or the context was removed meanwhile; DataLoss an object
//         that is not what the manifest says (names it), after it was fetched a second time.
// Edge:   the import verifies every byte and publishes in one step; what it refuses is fetched again once,
//         and what was whole is not fetched again.
// Ownership: the bucket outlives the stream. A view that At gave holds until the next At.
// Threads: one calls; ranges are read by threads of its own.
// Cost:   holds ahead x range_bytes.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kvstore/remote/bucket.h"
#include "kvstore/storage/context_stream.h"

namespace carrel::kvstore {

struct PullOptions {
  int threads = 4;  // ranges on their way at once
  int ahead = 8;    // ranges held or on their way
  int64_t range_bytes = int64_t{8} << 20;
  // Told what is fetched a second time, and why, one text at a time, also on threads of the stream's; may be null.
  std::function<void(const std::string&)> tell = nullptr;
};

class BucketStream {
 public:
  static absl::StatusOr<std::unique_ptr<BucketStream>> Open(const Bucket& bucket,
                                                            const std::string& name,
                                                            const PullOptions& options = {});
  ~BucketStream();

  const BoundName& name() const { return name_; }
  int64_t bytes() const { return bytes_; }  // of the whole stream
  // Some bytes from an offset on; empty at the end. Offsets follow each other, or jump.
  absl::StatusOr<absl::string_view> At(int64_t offset);

  // By the options' `tell`.
  void Tell(const std::string& text);

  // Forgets what is held: bytes that were refused are not given again.
  void Restart();

  // The file that begins at an offset of the stream; -1: none does.
  int64_t FileAt(int64_t offset) const;
  std::string FileUri(int64_t file) const;

 private:
  struct Range {
    int64_t file = 0, begin = 0, end = 0;  // bytes of the file
    bool done = false;
    absl::Status status;
    std::string bytes;
  };
  BucketStream(const Bucket& bucket, BoundName name, BucketManifest manifest,
               const PullOptions& options);
  void Plan(int64_t file, int64_t begin) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Fetch(Range& range);
  void Run();
  absl::StatusOr<absl::string_view> FileBytes(int64_t file, int64_t begin);

  const Bucket& bucket_;
  const BoundName name_;
  const BucketManifest manifest_;
  const PullOptions options_;
  std::string header_;                // of the stream
  std::vector<std::string> digests_;  // 32 bytes each
  std::vector<int64_t> begins_;       // of files, in the stream
  int64_t bytes_ = 0;

  absl::Mutex tell_mu_;
  absl::Mutex mu_;
  // The one that is read and those behind it, in order; the first `begun_` are done or on their way.
  std::deque<std::shared_ptr<Range>> ranges_ ABSL_GUARDED_BY(mu_);
  size_t begun_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t next_file_ ABSL_GUARDED_BY(mu_) = 0, next_begin_ ABSL_GUARDED_BY(mu_) = 0;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<Range> shown_;  // whose bytes At gave
  std::vector<std::thread> threads_;
};

// import: takes all of the stream from a source, and publishes; as ContextClient::Import and ImportFrom do. Called again
// where it refuses bytes.
absl::Status PullContext(BucketStream& stream,
                         const std::function<absl::Status(const StreamSourceFn&)>& import);

}  // namespace carrel::kvstore
