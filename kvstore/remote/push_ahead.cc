#include "kvstore/remote/push_ahead.h"

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/mapped_file.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kvstore/format/manifest.h"

namespace carrel::kvstore {
namespace {

// By `threads`, since all of a context is read; the first file that is not what was published is named.
absl::Status VerifyFiles(ContextExport& from, int threads,
                         const std::function<void(int64_t, int64_t)>& progress) {
  std::atomic<int64_t> next{0}, done{0};
  absl::Mutex mu;
  absl::Status status;
  const auto work = [&](bool tells) {
    for (int64_t file = next++; file < from.files(); file = next++) {
      const absl::Status verified = CatchThrown("push", [&] {
        return Annotate(from.VerifyFile(file, nullptr), absl::StrCat("push: file ", file));
      });
      done += static_cast<int64_t>(from.File(file).size());
      if (tells) progress(done, from.bytes());
      if (verified.ok()) continue;
      absl::MutexLock lock(&mu);
      status.Update(verified);
      return;
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(work, false);
  work(true);
  for (std::thread& thread : others) thread.join();
  progress(done, from.bytes());
  return status;
}

}  // namespace

PushAhead::PushAhead(const Bucket& bucket, const PushOptions& options)
    : bucket_(bucket),
      options_(options),
      ahead_([this](const FilesAhead::File& next, const auto&) { return Send(next); }) {}

absl::Status PushAhead::Send(const FilesAhead::File& next) {
  if (pusher_ == nullptr) {
    ASSIGN_OR_RETURN(std::unique_ptr<Pusher> begun, Pusher::Begin(bucket_, next.id, options_));
    absl::MutexLock lock(&mu_);
    pusher_ = std::move(begun);
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

absl::StatusOr<Pushed> PushAhead::Publish(const std::string& name, ContextExport& from,
                                          const std::function<void(int64_t, int64_t)>& progress) {
  {
    absl::MutexLock lock(&mu_);
    if (pusher_ != nullptr) sent_ = pusher_->sent_bytes();
  }
  // What was added goes on its way meanwhile.
  RETURN_IF_ERROR(VerifyFiles(from, options_.threads, progress));
  const absl::Status ahead = ahead_.Finish();
  // It sends out of `from`, which may go when this returns.
  const absl::Cleanup ends = [this] { pusher_ = nullptr; };
  ASSIGN_OR_RETURN(const ContextId id, ContextIdOf(from.manifest()));
  const int64_t before = pusher_ == nullptr ? 0 : pusher_->sent_bytes();
  // What failed on the way leaves a pusher that sends no more: another one finds what is there.
  const bool anew = pusher_ == nullptr || !ahead.ok() || id_ != id.ToString();
  if (anew) {
    taken_.clear();
    std::unique_ptr<Pusher> next;
    ASSIGN_OR_RETURN(next, Pusher::Begin(bucket_, id, options_));
    pusher_ = std::move(next);
  }
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
  }
  absl::StatusOr<Pushed> pushed = pusher_->Publish(name, from.header());
  if (pushed.ok() && anew) pushed->sent_bytes += before;
  return pushed;
}

}  // namespace carrel::kvstore
