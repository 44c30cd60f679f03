#include "kvstore/storage/unfinished.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/shown.h"
#include "common/status.h"
#include "kvstore/format/context_name.h"

namespace carrel::kvstore {
namespace {

namespace fs = std::filesystem;

// Whether the folder that is open is still the one of that name.
bool IsAt(int fd, const std::string& path) {
  struct stat open_folder, named;
  return fstat(fd, &open_folder) == 0 && stat(path.c_str(), &named) == 0 &&
         open_folder.st_dev == named.st_dev && open_folder.st_ino == named.st_ino;
}

// Files may go while they are looked at: then they do not count.
UnfinishedPrefill Measure(const std::string& path) {
  UnfinishedPrefill found = {.name = fs::path(path).filename().string(),
                             .touched = absl::InfinitePast()};
  const auto add = [&](const std::string& file) {
    struct stat info;
    if (stat(file.c_str(), &info) != 0) return;
    if (S_ISREG(info.st_mode)) found.bytes += info.st_size;
    found.touched = std::max(found.touched, absl::TimeFromTimespec(info.st_mtim));
  };
  add(path);
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    add(it->path().string());
  }
  return found;
}

absl::Status RemoveFolder(const std::string& folder) {
  ASSIGN_OR_RETURN(const FolderLock lock, FolderLock::Take(folder));
  std::error_code error;
  fs::remove_all(folder, error);
  return error ? ErrnoStatus(error.value(), absl::StrCat("remove ", folder)) : absl::OkStatus();
}

}  // namespace

std::string UnfinishedFolder(const std::string& store_folder, const std::string& name) {
  return (fs::path(store_folder) / "prefill" / name).string();
}

FolderLock::~FolderLock() {
  if (fd_ >= 0) close(fd_);
}
FolderLock::FolderLock(FolderLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
FolderLock& FolderLock::operator=(FolderLock&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

absl::StatusOr<FolderLock> FolderLock::Take(const std::string& folder, absl::Duration wait) {
  const absl::Time until = absl::Now() + wait;
  for (;;) {
    FolderLock lock(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (lock.fd_ < 0) return ErrnoStatus(errno, absl::StrCat("open ", folder));
    if (flock(lock.fd_, LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) return ErrnoStatus(errno, absl::StrCat("lock ", folder));
      if (absl::Now() < until) {
        absl::SleepFor(absl::Milliseconds(10));
        continue;
      }
      return absl::FailedPreconditionError(
          absl::StrCat(folder, " is being worked on, by this process or another"));
    }
    if (IsAt(lock.fd_, folder)) return lock;
  }
}

absl::StatusOr<std::vector<UnfinishedPrefill>> ListUnfinished(const std::string& store_folder) {
  const std::string folder = store_folder + "/prefill";
  std::vector<UnfinishedPrefill> all;
  std::error_code error;
  fs::directory_iterator it(folder, error);
  if (error == std::errc::no_such_file_or_directory) return all;
  for (const fs::directory_iterator end; !error && it != end; it.increment(error)) {
    std::error_code gone;
    const std::string path = it->path().string();
    if (!fs::is_directory(path, gone) ||
        !ValidateContextName(it->path().filename().string()).ok()) {
      continue;
    }
    all.push_back(Measure(path));
    all.back().running = absl::IsFailedPrecondition(FolderLock::Take(path).status());
  }
  if (error) return ErrnoStatus(error.value(), absl::StrCat("list ", folder));
  std::sort(all.begin(), all.end(),
            [](const UnfinishedPrefill& a, const UnfinishedPrefill& b) { return a.name < b.name; });
  return all;
}

absl::Status RemoveUnfinished(const std::string& store_folder, const std::string& name) {
  RETURN_IF_ERROR(ValidateContextName(name));
  const absl::Status removed = RemoveFolder(UnfinishedFolder(store_folder, name));
  if (absl::IsNotFound(removed)) {
    return absl::NotFoundError(
        absl::StrCat("no unfinished prefill ", Shown(name), " in store ", store_folder));
  }
  return Annotate(removed, absl::StrCat("unfinished prefill ", name));
}

RemovedUnfinished SweepUnfinished(const std::string& store_folder,
                                  absl::FunctionRef<absl::Duration(const std::string&)> keep_for,
                                  absl::Time now) {
  RemovedUnfinished removed;
  const absl::StatusOr<std::vector<UnfinishedPrefill>> all = ListUnfinished(store_folder);
  if (!all.ok()) return removed;
  for (const UnfinishedPrefill& one : *all) {
    if (one.running || now - one.touched <= keep_for(one.name)) continue;
    if (!RemoveUnfinished(store_folder, one.name).ok()) continue;
    ++removed.prefills;
    removed.bytes += one.bytes;
  }
  return removed;
}

}  // namespace carrel::kvstore
