#include "common/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/cleanup/cleanup.h"
#include "common/status.h"

namespace carrel {

absl::StatusOr<std::unique_ptr<MappedFile>> MappedFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("open ", path));
  absl::Cleanup close_fd = [fd] { close(fd); };
  struct stat info;
  if (fstat(fd, &info) != 0) return ErrnoStatus(errno, absl::StrCat("stat ", path));
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("open ", path, ": not a regular file"));
  }
  if (info.st_size == 0) return std::unique_ptr<MappedFile>(new MappedFile(absl::string_view()));
  void* data = mmap(nullptr, info.st_size, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return ErrnoStatus(errno, absl::StrCat("mmap ", path));
  return std::unique_ptr<MappedFile>(
      new MappedFile(absl::string_view(static_cast<const char*>(data), info.st_size)));
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

void MappedFile::Expect(FileAccess access) const {
  if (bytes_.empty()) return;
  void* data = const_cast<char*>(bytes_.data());
  if (access == FileAccess::kSparse) {
    (void)madvise(data, bytes_.size(), MADV_RANDOM);
    return;
  }
  (void)madvise(data, bytes_.size(), MADV_NORMAL);
  (void)madvise(data, bytes_.size(), MADV_HUGEPAGE);
}

void MappedFile::ReleasePages() const {
  // Advice only: a failure keeps memory, not wrong bytes.
  if (!bytes_.empty()) (void)madvise(const_cast<char*>(bytes_.data()), bytes_.size(), MADV_DONTNEED);
}

}  // namespace carrel
