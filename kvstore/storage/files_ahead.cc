#include "kvstore/storage/files_ahead.h"

#include <utility>

#include "absl/status/statusor.h"
#include "common/mapped_file.h"
#include "common/scheduling.h"
#include "common/thrown.h"

namespace carrel::kvstore {

FilesAhead::FilesAhead(Send send) : send_(std::move(send)), thread_([this] { Run(); }) {}

FilesAhead::~FilesAhead() {
  dropped_ = true;
  Finish().IgnoreError();
}

void FilesAhead::Add(ContextId id, int64_t file, const std::string& path) {
  absl::StatusOr<std::unique_ptr<MappedFile>> bytes = MappedFile::Open(path);
  absl::MutexLock lock(&mu_);
  status_.Update(bytes.status());
  if (status_.ok()) waiting_.push_back({id, file, *std::move(bytes)});
}

absl::Status FilesAhead::Finish() {
  {
    absl::MutexLock lock(&mu_);
    ended_ = true;
  }
  if (thread_.joinable()) thread_.join();
  return status();
}

absl::Status FilesAhead::status() const {
  absl::MutexLock lock(&mu_);
  return status_;
}

void FilesAhead::Run() {
  WorkBehind();  // a loop over all cores waits for the one whose core was taken
  for (;;) {
    File next;
    {
      absl::MutexLock lock(&mu_);
      const auto work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return ended_ || !waiting_.empty();
      };
      mu_.Await(absl::Condition(&work));
      if (waiting_.empty() || dropped_ || !status_.ok()) return;
      next = std::move(waiting_.front());
      waiting_.pop_front();
    }
    const absl::Status sent =
        CatchThrown("sending ahead", [&] { return send_(next, [this] { return !dropped_; }); });
    absl::MutexLock lock(&mu_);
    status_.Update(sent);
  }
}

}  // namespace carrel::kvstore
