// What:   notices that a mapped file was written to after its bytes were verified (decision 035).
//         Who reads looks before and after: if both looks give the same number, no byte changed in
//         between by a write that bears a time (common/file_identity.h says which do not).
// Edge:   a write that lasts longer than a tick ends after the time that it bears: a file that was
//         seen to change counts as changed once more, kSettled later.
// Errors: DataLoss (names the file): its size is not what was mapped; pages of it could not be read;
//         it is written to all the time.
// Ownership: the file outlives it.
// Cost:   a look is an fstat, some 0.3 us. One that finds a change waits until the file's clock has
//         ticked on: some 20 ms.
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/mapped_file.h"

namespace carrel::kvstore {

class FileWatch {
 public:
  static constexpr absl::Duration kSettled = absl::Seconds(3);

  // file outlives this.
  explicit FileWatch(const MappedFile* file) : file_(file), known_(file->opened_as()) {}

  // How often the file was found changed, now included. On a change `forget` is called before
  // anybody gets the new number; it must not come back here.
  absl::StatusOr<int64_t> Look(absl::FunctionRef<void()> forget) const;
  // What the last look gave.
  int64_t changes() const { return changes_.load(std::memory_order_acquire); }

  // What is known of the file is wrong, for another reason than a change of its identity.
  void Distrust(absl::FunctionRef<void()> forget) const;

  // Of all files of this process since it started.
  static int64_t total_changes();
  static int64_t total_damaged();  // files

 private:
  absl::Status CheckSize(const FileIdentity& now) const;
  absl::Status CountDamage(absl::Status status) const;
  // The file as it is once it has not been written to for a tick.
  absl::StatusOr<FileIdentity> Settle() const;
  void Changed(absl::FunctionRef<void()> forget) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const MappedFile* const file_;
  mutable absl::Mutex mu_;
  mutable FileIdentity known_ ABSL_GUARDED_BY(mu_);
  mutable absl::Time again_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  mutable std::atomic<int64_t> changes_{0};
  mutable std::atomic<bool> counted_damage_{false};
};

}  // namespace carrel::kvstore
