#include "kvstore/remote/push_ahead.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/mapped_file.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kvstore/format/manifest.h"

namespace carrel::kvstore {
PushAhead::PushAhead(const Bucket& bucket, const PushOptions& options)
    : bucket_(bucket), options_(options), thread_([this] { Run(); }) {}

PushAhead::~PushAhead() {
  {
    absl::MutexLock lock(&mu_);
    dropped_ = true;
    waiting_.clear();
  }
  EndThread();
}

void PushAhead::EndThread() {
  {
    absl::MutexLock lock(&mu_);
    ended_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

absl::Status PushAhead::ahead_status() const {
  absl::MutexLock lock(&mu_);
  return status_;
}

void PushAhead::Add(ContextId id, int64_t file, const std::string& path) {
  absl::StatusOr<std::unique_ptr<MappedFile>> bytes = MappedFile::Open(path);
  absl::MutexLock lock(&mu_);
  status_.Update(bytes.status());
  if (status_.ok()) waiting_.push_back({id, file, *std::move(bytes)});
}

absl::Status PushAhead::Send(const Waiting& next) {
  if (pusher_ == nullptr) {
    ASSIGN_OR_RETURN(pusher_, Pusher::Begin(bucket_, next.id, options_));
    id_ = next.id.ToString();
  }
  if (next.id.ToString() != id_) {
    return absl::InternalError(absl::StrCat("push: file ", next.file, " is of context ",
                                            next.id.ToString(), ", those before of ", id_));
  }
  const std::string sha256 = Sha256Hex(next.bytes->bytes());
  RETURN_IF_ERROR(pusher_->AddFile(next.file, next.bytes->bytes(), sha256, next.bytes));
  taken_[next.file] = static_cast<int64_t>(next.bytes->bytes().size());
  return absl::OkStatus();
}

void PushAhead::Run() {
  for (;;) {
    Waiting next;
    {
      absl::MutexLock lock(&mu_);
      const auto work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return ended_ || dropped_ || !waiting_.empty();
      };
      mu_.Await(absl::Condition(&work));
      if (waiting_.empty() || dropped_) return;
      next = std::move(waiting_.front());
      waiting_.pop_front();
    }
    const absl::Status sent = CatchThrown("sending ahead", [&] { return Send(next); });
    absl::MutexLock lock(&mu_);
    status_.Update(sent);
    if (!sent.ok()) waiting_.clear();
  }
}

absl::StatusOr<Pushed> PushAhead::Publish(const std::string& name, ContextExport& from,
                                          const std::function<void(int64_t, int64_t)>& progress) {
  EndThread();
  // It sends out of `from`, which may go when this returns.
  const absl::Cleanup ends = [this] { pusher_ = nullptr; };
  ASSIGN_OR_RETURN(const ContextId id, ContextIdOf(from.manifest()));
  if (pusher_ != nullptr) sent_ = pusher_->sent_bytes();
  const int64_t before = sent_;
  // What failed on the way leaves a pusher that sends no more: another one finds what is there.
  const bool anew = pusher_ == nullptr || !ahead_status().ok() || id_ != id.ToString();
  if (anew) {
    taken_.clear();
    std::unique_ptr<Pusher> next;
    ASSIGN_OR_RETURN(next, Pusher::Begin(bucket_, id, options_));
    pusher_ = std::move(next);
  }
  int64_t done = 0;
  for (int64_t file = 0; file < from.files(); ++file) {
    const absl::string_view bytes = from.File(file);
    const auto taken = taken_.find(file);
    std::string sha256;
    const absl::Status verified = from.VerifyFile(file, taken == taken_.end() ? &sha256 : nullptr);
    if (!verified.ok()) return Annotate(verified, absl::StrCat("push: file ", file));
    if (taken == taken_.end()) {
      RETURN_IF_ERROR(pusher_->AddFile(file, bytes, sha256, nullptr));
    } else if (taken->second != static_cast<int64_t>(bytes.size())) {
      return absl::DataLossError(absl::StrCat("push: file ", file, " has ", bytes.size(),
                                              " bytes, what was sent ahead of it has ",
                                              taken->second));
    }
    done += static_cast<int64_t>(bytes.size());
    progress(done, from.bytes());
  }
  absl::StatusOr<Pushed> pushed = pusher_->Publish(name, from.header());
  if (pushed.ok() && anew) pushed->sent_bytes += before;
  return pushed;
}

}  // namespace carrel::kvstore
