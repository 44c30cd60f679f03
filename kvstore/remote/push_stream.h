// What:   a context's stream (context_stream.h) goes into a bucket piece by piece, as a server gives it: each file
//         lies on this machine until it is sent.
// Errors: as push.h; DataLoss a stream that does not add up; ResourceExhausted the folder's disk is full.
// Ownership: the bucket outlives it.
// Threads: one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/checksum.h"
#include "kvstore/remote/push.h"

namespace carrel::kvstore {

class StreamPush {
 public:
  // name: in the bucket; empty: the stream's. folder: where files lie meanwhile, some at once; they are
  // gone with the process, however it ends.
  StreamPush(const Bucket& bucket, std::string name, std::string folder,
             const PushOptions& options = {});
  ~StreamPush();

  absl::Status Take(absl::string_view piece);
  // Once the whole stream was taken.
  absl::StatusOr<Pushed> Finish();
  int64_t bytes() const { return bytes_; }  // of the whole stream; 0: not known yet

 private:
  absl::Status Begin();
  absl::Status BeginFile();
  absl::Status EndFile();

  const Bucket& bucket_;
  std::string name_;
  const std::string folder_;
  const PushOptions options_;
  std::unique_ptr<Pusher> pusher_;
  StreamHeader header_;
  std::string so_far_;  // of the header, or of a digest
  int64_t bytes_ = 0;
  size_t file_ = 0;
  int64_t left_ = 0;  // of the file
  int fd_ = -1;
  std::unique_ptr<Sha256> sha_;
};

}  // namespace carrel::kvstore
