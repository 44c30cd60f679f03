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

// Whether what is open is still what has that name: another process may have removed it, and locked one of its own.
bool IsAt(int fd, const std::string& path) {
  struct stat open_one, named;
  return fstat(fd, &open_one) == 0 && stat(path.c_str(), &named) == 0 &&
         open_one.st_dev == named.st_dev && open_one.st_ino == named.st_ino;
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
    FolderLock lock;
    lock.fd_ = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
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

absl::StatusOr<FolderLock> FolderLock::TakeFile(const std::string& lock_file) {
  for (;;) {
    FolderLock lock;
    lock.fd_ = open(lock_file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock.fd_ < 0) return ErrnoStatus(errno, lock_file);
    if (flock(lock.fd_, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return ErrnoStatus(errno, lock_file);
      return absl::FailedPreconditionError("another import of this context is going on");
    }
    if (IsAt(lock.fd_, lock_file)) return lock;
  }
}

FolderUse MeasureFolder(const std::string& folder) {
  FolderUse use;
  const auto add = [&](const std::string& file) {
    struct stat info;
    if (stat(file.c_str(), &info) != 0) return;
    if (S_ISREG(info.st_mode)) use.bytes += info.st_size;
    use.touched = std::max(use.touched, absl::TimeFromTimespec(info.st_mtim));
  };
  add(folder);
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    add(it->path().string());
  }
  return use;
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
    const std::string name = it->path().filename().string();
    if (!fs::is_directory(path, gone) || !ValidateContextName(name).ok()) continue;
    const FolderUse use = MeasureFolder(path);
    all.push_back({.name = name,
                   .bytes = use.bytes,
                   .touched = use.touched,
                   .running = absl::IsFailedPrecondition(FolderLock::Take(path).status())});
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
