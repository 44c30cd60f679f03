// What:   a context of a folder becomes one of a server: prefill into a store that is being served.
// Errors: AlreadyExists the server has the name; as Store::Export and ContextClient::Import.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kvstore/format/context_id.h"

namespace carrel {
class MappedFile;
class Progress;
}  // namespace carrel
namespace carrel::v1 {
class ImportReply;
}
namespace carrel::kvstore {
class ContextClient;
class Store;
}  // namespace carrel::kvstore

namespace carrel::library {

// Before hours are spent: OK if the server has no context of the name and takes one in from this
// client, or has the one of this content id (of an earlier run that was interrupted at its very end).
absl::Status CheckNameIsFreeAt(kvstore::ContextClient& server, const std::string& name,
                               const std::string& content_id);

// Sends the context to the server, which publishes it, and deletes it from the folder. Interrupted,
// the same call goes on where it was.
absl::StatusOr<v1::ImportReply> MoveContext(kvstore::Store& from, const std::string& name,
                                            kvstore::ContextClient& to, Progress& progress);

// Sends files of a context that is still being computed to the server that it will move to, on a
// thread of its own, in the order in which they are given. After a failure nothing more is sent:
// MoveContext sends whatever the server lacks.
// Ownership: the client outlives it.
class AheadSender {
 public:
  AheadSender(kvstore::ContextClient* to, std::string name);
  ~AheadSender();  // stops in the middle of a file

  // The file at `path`, which is opened now, is to be the context's file `file`.
  void Send(kvstore::ContextId id, int64_t file, const std::string& path);
  // Waits until all is sent, or failed.
  absl::Status Finish();
  int64_t bytes() const { return bytes_; }  // sent so far

 private:
  struct Waiting {
    kvstore::ContextId id;
    int64_t file;
    std::unique_ptr<MappedFile> bytes;
  };
  void Run();

  kvstore::ContextClient& to_;
  const std::string name_;
  std::atomic<int64_t> bytes_{0};
  std::atomic<bool> stopping_{false};
  absl::Mutex mu_;
  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mu_);  // the first one is being sent
  bool ended_ ABSL_GUARDED_BY(mu_) = false;           // none will follow
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace carrel::library
