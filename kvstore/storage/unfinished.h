// What:   prefills of a store that were not finished: folders STORE/prefill/NAME, of which their next
//         run makes a context, or which somebody removes.
// Errors: NotFound no unfinished prefill of the name; FailedPrecondition somebody works on it;
//         InvalidArgument a name that no context can have; as ErrnoStatus.
// Threads: any; also beside other processes: whoever works in such a folder holds its lock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace carrel::kvstore {

// After which nobody is expected to go on with one: as interrupted imports.
inline constexpr absl::Duration kUnfinishedAge = absl::Hours(7 * 24);

std::string UnfinishedFolder(const std::string& store_folder, const std::string& name);

// A folder in which this holder alone works, in any process. The folder may be removed meanwhile.
class FolderLock {
 public:
  FolderLock() = default;  // of none
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&& other) noexcept;
  // FailedPrecondition: another holder has it still after `wait`.
  static absl::StatusOr<FolderLock> Take(const std::string& folder,
                                         absl::Duration wait = absl::ZeroDuration());
  // Of an import's folder, FOLDER/ID: held by a file FOLDER/ID.lock, which is made if there is none.
  static absl::StatusOr<FolderLock> TakeFile(const std::string& lock_file);

 private:
  int fd_ = -1;
};

// Of a folder's files. Those that go while they are looked at do not count.
struct FolderUse {
  int64_t bytes = 0;
  absl::Time touched = absl::InfinitePast();  // when something was last written
};
FolderUse MeasureFolder(const std::string& folder);

struct UnfinishedPrefill {
  std::string name;
  int64_t bytes = 0;
  absl::Time touched;    // when something was last written
  bool running = false;  // somebody works on it
};

// By name. None where the store has no such folder.
absl::StatusOr<std::vector<UnfinishedPrefill>> ListUnfinished(const std::string& store_folder);

absl::Status RemoveUnfinished(const std::string& store_folder, const std::string& name);

struct RemovedUnfinished {
  int64_t prefills = 0;
  int64_t bytes = 0;
};

// Removes what nobody works on and nobody has written to for longer than keep_for of its name; what
// cannot be removed stays.
RemovedUnfinished SweepUnfinished(const std::string& store_folder,
                                  absl::FunctionRef<absl::Duration(const std::string&)> keep_for,
                                  absl::Time now = absl::Now());

}  // namespace carrel::kvstore
