#include "common/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "absl/cleanup/cleanup.h"
#include "common/status.h"

namespace carrel {

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t most_bytes) {
  const bool standard_input = path == "-";
  // O_NONBLOCK: to open a FIFO that nobody writes to would wait for ever.
  const int fd =
      standard_input ? STDIN_FILENO : open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("open ", path));
  absl::Cleanup close_fd = [fd, standard_input] {
    if (!standard_input) close(fd);
  };
  struct stat info;
  if (!standard_input && fstat(fd, &info) != 0)
    return ErrnoStatus(errno, absl::StrCat("stat ", path));
  if (!standard_input && !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("open ", path, ": not a regular file"));
  }
  std::string bytes;
  for (;;) {
    const size_t before = bytes.size();
    bytes.resize(before + (1 << 16));
    const ssize_t n = read(fd, bytes.data() + before, bytes.size() - before);
    if (n < 0 && errno == EINTR) {
      bytes.resize(before);
      continue;
    }
    if (n < 0) return ErrnoStatus(errno, absl::StrCat("read ", path));
    bytes.resize(before + n);
    if (n == 0) return bytes;
    if (static_cast<int64_t>(bytes.size()) > most_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("read ", path, ": more than ", most_bytes, " bytes"));
    }
  }
}

namespace {

// Of one write. For a larger one the kernel takes larger pages (Linux 6.16 and later on ext4), and in a virtual machine these
// are memory that its host took back: 2 GB by 1 MiB take 4.4 s there, by these 0.5.
constexpr size_t kWriteBytes = size_t{32} << 10;

absl::Status SyncFolder(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("open ", path));
  absl::Cleanup close_fd = [fd] { close(fd); };
  if (fsync(fd) != 0) return ErrnoStatus(errno, absl::StrCat("fsync ", path));
  return absl::OkStatus();
}

absl::Status WriteAndSync(const std::string& path, absl::Span<const absl::string_view> pieces) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("create ", path));
  absl::Cleanup close_fd = [fd] { close(fd); };
  for (const absl::string_view bytes : pieces) {
    RETURN_IF_ERROR(WriteAll(fd, bytes, absl::StrCat("write ", path)));
  }
  if (fsync(fd) != 0) return ErrnoStatus(errno, absl::StrCat("fsync ", path));
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteAll(int fd, absl::string_view bytes, const std::string& what) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), std::min(bytes.size(), kWriteBytes));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, what);
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

absl::Status MakePrivateFolder(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!parent.empty()) std::filesystem::create_directories(parent, error);
  if (error) return ErrnoStatus(error.value(), absl::StrCat("create ", parent.string()));
  if (mkdir(path.c_str(), 0700) == 0) return absl::OkStatus();
  const int why = errno;
  if (why == EEXIST && std::filesystem::is_directory(path, error)) return absl::OkStatus();
  return ErrnoStatus(why, absl::StrCat("create ", path));
}

absl::Status ProbeRoom(const std::string& path, int64_t offset, int64_t bytes) {
  const auto none = [&](int error, absl::string_view why) {
    return ErrnoStatus(error, absl::StrCat(path, ": room for ", bytes, " bytes at ", offset, why));
  };
  const std::string probe = path + ".room";
  const int fd = open(probe.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("create ", probe));
  const absl::Cleanup remove = [&] {
    close(fd);
    unlink(probe.c_str());
  };
  struct statvfs disk;
  if (fstatvfs(fd, &disk) == 0 && disk.f_frsize > 0) {
    const auto free = static_cast<int64_t>(disk.f_bavail);
    const auto unit = static_cast<int64_t>(disk.f_frsize);
    if (bytes / unit > free) return none(ENOSPC, absl::StrCat(", ", free * unit, " are free"));
  }
  const int64_t probed = std::min(bytes, kProbedBytes);
  if (fallocate(fd, 0, offset + bytes - probed, probed) == 0) return absl::OkStatus();
  if (errno == EOPNOTSUPP || errno == EINTR) return absl::OkStatus();  // nothing learnt
  return none(errno, "");
}

absl::Status WritePrivateFile(const std::string& path, absl::string_view bytes) {
  const std::string temporary = path + ".tmp";
  unlink(temporary.c_str());  // whatever it was, nobody else's is written to
  const int fd =
      open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("write ", path));
  const ssize_t written = write(fd, bytes.data(), bytes.size());
  const int error = written < 0 ? errno : ENOSPC;
  const bool whole = close(fd) == 0 && written == static_cast<ssize_t>(bytes.size());
  if (whole && rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const absl::Status failed = ErrnoStatus(whole ? errno : error, absl::StrCat("write ", path));
  unlink(temporary.c_str());
  return failed;
}

absl::Status WriteFileAtomically(const std::string& path,
                                 absl::Span<const absl::string_view> pieces) {
  const std::string temporary = path + ".tmp";
  if (absl::Status status = WriteAndSync(temporary, pieces); !status.ok()) {
    unlink(temporary.c_str());
    return status;
  }
  if (rename(temporary.c_str(), path.c_str()) != 0) {
    const absl::Status status =
        ErrnoStatus(errno, absl::StrCat("rename ", temporary, " to ", path));
    unlink(temporary.c_str());
    return status;
  }
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return SyncFolder(folder.empty() ? "." : folder);
}

}  // namespace carrel
