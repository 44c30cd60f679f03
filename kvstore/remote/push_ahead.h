// What:   a context that is still being computed goes into a bucket: each file as soon as it is final, on threads
//         of this class's, and at the end what is missing, the manifest and the name (push.h). Nothing is visible
//         before that.
// Errors: of Publish: as push.h; DataLoss a file that is not what the manifest says (names it). A failure on the way is
//         not told before: Publish sends what is missing, and ahead_status() says why there was something.
// Edge:   Add never waits for the network: what is not sent yet lies in files that are mapped. Destroyed without
//         Publish it leaves files that nobody sees, which another attempt under the same context id finds, or
//         `carrel gc` removes.
// Ownership: the bucket outlives it.
// Threads: Add and Publish from one.
//
//   PushAhead ahead(bucket);
//   config.sealed = [&](const SealedLayer& layer) { .. ahead.Add(id, file, path); };
//   .. prefill into a folder ..
//   ahead.Publish("report", **store.Export("report"), [](int64_t, int64_t) {});
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvstore/format/context_id.h"
#include "kvstore/remote/push.h"
#include "kvstore/storage/context_stream.h"
#include "kvstore/storage/files_ahead.h"

namespace carrel::kvstore {

class PushAhead {
 public:
  explicit PushAhead(const Bucket& bucket, const PushOptions& options = {});

  // As FilesAhead::Add.
  void Add(ContextId id, int64_t file, const std::string& path) { ahead_.Add(id, file, path); }
  // from: the whole context. Where it has another id than what was added, all of it is sent.
  absl::StatusOr<Pushed> Publish(const std::string& name, ContextExport& from,
                                 const std::function<void(int64_t, int64_t)>& progress);

  // Once Publish was called: what had been sent before that.
  int64_t sent_ahead() const { return sent_; }
  // Whether all that was added could be sent, so far.
  absl::Status ahead_status() const { return ahead_.status(); }

 private:
  absl::Status Send(const FilesAhead::File& next);

  const Bucket& bucket_;
  const PushOptions options_;
  int64_t sent_ = 0;
  // The thread's, then Publish's.
  std::unique_ptr<Pusher> pusher_;
  std::string id_;
  std::map<int64_t, int64_t> taken_;  // bytes of files that the pusher was given
  FilesAhead ahead_;                  // ends before what it sends to
};

}  // namespace carrel::kvstore
