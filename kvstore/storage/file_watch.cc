#include "kvstore/storage/file_watch.h"

#include "absl/time/clock.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

constexpr absl::Duration kLongestSettling = absl::Seconds(1);

std::atomic<int64_t> all_changes{0}, all_damaged{0};

}  // namespace

int64_t FileWatch::total_changes() { return all_changes.load(); }
int64_t FileWatch::total_damaged() { return all_damaged.load(); }

absl::StatusOr<int64_t> FileWatch::Look(absl::FunctionRef<void()> forget) const {
  RETURN_IF_ERROR(CountDamage(file_->CheckReadable()));
  ASSIGN_OR_RETURN(const FileIdentity seen, file_->Identify());
  absl::MutexLock lock(&mu_);
  const bool due = absl::Now() >= again_;
  if (seen == known_ && !due) return changes();
  ASSIGN_OR_RETURN(const FileIdentity now, Settle());
  RETURN_IF_ERROR(CountDamage(CheckSize(now)));
  if (now != known_) {
    all_changes.fetch_add(1);
    again_ = absl::Now() + kSettled;
  } else if (due) {
    again_ = absl::InfiniteFuture();
  } else {
    return changes();  // another thread's look found it meanwhile
  }
  Changed(forget);
  known_ = now;
  return changes();
}

void FileWatch::Distrust(absl::FunctionRef<void()> forget) const {
  absl::MutexLock lock(&mu_);
  Changed(forget);
}

void FileWatch::Changed(absl::FunctionRef<void()> forget) const {
  forget();
  changes_.fetch_add(1, std::memory_order_acq_rel);
}

absl::StatusOr<FileIdentity> FileWatch::Settle() const {
  for (const absl::Time until = absl::Now() + kLongestSettling; absl::Now() < until;) {
    ASSIGN_OR_RETURN(const FileIdentity now, file_->Identify());
    const absl::Duration age = now.Age();
    // A time in the future is not this tick's either: the clock was set back.
    if (age > FileIdentity::kTick || age < -FileIdentity::kTick) return now;
    absl::SleepFor(FileIdentity::kTick);
  }
  return absl::DataLossError(absl::StrCat(file_->path(), ": is being written to while it is read"));
}

absl::Status FileWatch::CheckSize(const FileIdentity& now) const {
  const auto mapped = static_cast<int64_t>(file_->bytes().size());
  if (now.size == mapped) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(file_->path(), ": ", now.size, " bytes, it was opened with ", mapped));
}

absl::Status FileWatch::CountDamage(absl::Status status) const {
  if (!status.ok() && !counted_damage_.exchange(true)) all_damaged.fetch_add(1);
  return status;
}

}  // namespace carrel::kvstore
