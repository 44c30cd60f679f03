// What:   files of a context that is still being computed go to where it will be, on a thread of this class's, in the
//         order in which they are given. It, and whom it starts, compute behind others (common/scheduling.h): layers are being
//         computed on the same cores. After a failure no more go: who publishes the context sends what is missing.
// Edge:   Add never waits: what is not sent yet lies in files that are mapped.
// Threads: Add and Finish from one.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "kvstore/format/context_id.h"

namespace carrel {
class MappedFile;
}

namespace carrel::kvstore {

class FilesAhead {
 public:
  struct File {
    ContextId id;
    int64_t file;
    std::shared_ptr<const MappedFile> bytes;
  };
  // On the thread; `wanted` false: it ends in the middle of a file.
  using Send = std::function<absl::Status(const File& file, const std::function<bool()>& wanted)>;

  explicit FilesAhead(Send send);
  ~FilesAhead();  // what waits is not sent

  // The file at `path`, which is opened now and may be moved then, is to be the context's file `file`.
  void Add(ContextId id, int64_t file, const std::string& path);
  // Waits until all is sent, or failed.
  absl::Status Finish();
  absl::Status status() const;  // so far

 private:
  void Run();

  const Send send_;
  std::atomic<bool> dropped_{false};
  mutable absl::Mutex mu_;
  std::deque<File> waiting_ ABSL_GUARDED_BY(mu_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false;  // none will follow
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace carrel::kvstore
