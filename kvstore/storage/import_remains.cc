#include "kvstore/storage/import_remains.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "common/checksum.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

namespace fs = std::filesystem;

constexpr char kOfOwner[] = "of-", kLock[] = ".lock";

// Whether the file that is open is the one of that name: another process may have removed it, and
// locked one of its own.
bool IsAt(int fd, const std::string& path) {
  struct stat open_file, named;
  return fstat(fd, &open_file) == 0 && stat(path.c_str(), &named) == 0 &&
         open_file.st_dev == named.st_dev && open_file.st_ino == named.st_ino;
}

ImportRemains Measure(const std::string& path) {
  ImportRemains remains = {.path = path, .touched = absl::InfinitePast()};
  const auto add = [&](const fs::path& file) {
    struct stat info;
    if (stat(file.c_str(), &info) != 0) return;
    if (S_ISREG(info.st_mode)) remains.bytes += info.st_size;
    remains.touched = std::max(remains.touched, absl::TimeFromTimespec(info.st_mtim));
  };
  add(path);
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    add(it->path());
  }
  return remains;
}

std::string LockOf(const ImportRemains& remains) { return remains.path + kLock; }

// By who holds its lock.
bool Remove(const ImportRemains& remains) {
  std::error_code error;
  fs::remove_all(remains.path, error);
  if (!error) fs::remove(LockOf(remains), error);
  return !error;
}

std::vector<std::string> PathsIn(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    paths.push_back(it->path().string());
  }
  return paths;
}

void EndPublishedOf(const std::string& folder,
                    absl::FunctionRef<bool(const std::string& id)> is_published) {
  for (const ImportRemains& remains : ListImportRemains(folder)) {
    if (is_published(fs::path(remains.path).filename().string())) Remove(remains);
  }
  for (const std::string& path : PathsIn(folder)) {  // of those that were removed half
    std::error_code ignored;
    if (absl::EndsWith(path, kLock) &&
        !fs::exists(std::string(absl::StripSuffix(path, kLock)), ignored)) {
      fs::remove(path, ignored);
    }
  }
}

}  // namespace

ImportLock::~ImportLock() {
  if (fd_ >= 0) close(fd_);
}

ImportLock::ImportLock(ImportLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

ImportLock& ImportLock::operator=(ImportLock&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

absl::StatusOr<ImportLock> ImportLock::Take(const std::string& path) {
  for (;;) {
    ImportLock lock;
    lock.fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock.fd_ < 0) return ErrnoStatus(errno, path);
    if (flock(lock.fd_, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return ErrnoStatus(errno, path);
      return absl::FailedPreconditionError("another import of this context is going on");
    }
    if (IsAt(lock.fd_, path)) return lock;
  }
}

std::vector<ImportRemains> ListImportRemains(const std::string& folder) {
  std::vector<ImportRemains> all;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    std::error_code gone;
    if (absl::StartsWith(name, kOfOwner) || !it->is_directory(gone)) continue;
    all.push_back(Measure(it->path().string()));
  }
  std::sort(all.begin(), all.end(),
            [](const ImportRemains& a, const ImportRemains& b) { return a.touched < b.touched; });
  return all;
}

RemovedRemains RemoveImportRemains(const std::string& folder, const RemainsLimits& limits,
                                   absl::Time now) {
  std::vector<std::pair<ImportRemains, ImportLock>> abandoned;  // whose locks we have
  int64_t bytes = 0;
  for (const ImportRemains& remains : ListImportRemains(folder)) {
    absl::StatusOr<ImportLock> lock = ImportLock::Take(LockOf(remains));
    if (!lock.ok()) continue;
    bytes += remains.bytes;
    abandoned.emplace_back(remains, *std::move(lock));
  }
  RemovedRemains removed;
  for (const auto& [remains, lock] : abandoned) {
    if (now - remains.touched <= limits.age && bytes <= limits.bytes) break;  // oldest first
    if (!Remove(remains)) continue;
    bytes -= remains.bytes;
    ++removed.imports;
    removed.bytes += remains.bytes;
  }
  return removed;
}

RemovedRemains RemoveOldImportRemains(const std::string& imports, absl::Duration age,
                                      absl::Time now) {
  RemovedRemains removed = RemoveImportRemains(imports, {.age = age}, now);
  for (const std::string& path : PathsIn(imports)) {
    if (!absl::StartsWith(fs::path(path).filename().string(), kOfOwner)) continue;
    const RemovedRemains of_owner = RemoveImportRemains(path, {.age = age}, now);
    removed.imports += of_owner.imports;
    removed.bytes += of_owner.bytes;
  }
  return removed;
}

void EndPublishedImports(const std::string& imports,
                         absl::FunctionRef<bool(const std::string& id)> is_published) {
  EndPublishedOf(imports, is_published);
  for (const std::string& path : PathsIn(imports)) {
    if (absl::StartsWith(fs::path(path).filename().string(), kOfOwner)) {
      EndPublishedOf(path, is_published);
    }
  }
}

std::string ImportsFolderOf(const std::string& imports, const std::string& owner) {
  if (owner.empty()) return imports;
  return absl::StrCat(imports, "/", kOfOwner, Sha256Hex(owner).substr(0, 32));
}

}  // namespace carrel::kvstore
