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
  // O_NONBLOCK: to open a FIFO that nobody writes to would wait for ever.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("open ", path));
  absl::Cleanup close_fd = [fd] { close(fd); };
  struct stat info;
  if (fstat(fd, &info) != 0) return ErrnoStatus(errno, absl::StrCat("stat ", path));
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("open ", path, ": not a regular file"));
  }
  if (info.st_size == 0) return std::unique_ptr<MappedFile>(new MappedFile(path, {}));
  void* data = mmap(nullptr, info.st_size, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return ErrnoStatus(errno, absl::StrCat("mmap ", path));
  return std::unique_ptr<MappedFile>(
      new MappedFile(path, absl::string_view(static_cast<const char*>(data), info.st_size)));
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

void MappedFile::Expect(FileAccess access) const {
  if (bytes_.empty()) return;
  void* data = const_cast<char*>(bytes_.data());
  if (access == FileAccess::kSparse) {
    (void)madvise(data, bytes_.size(), MADV_NOHUGEPAGE);
    (void)madvise(data, bytes_.size(), MADV_RANDOM);
    return;
  }
  (void)madvise(data, bytes_.size(), MADV_NORMAL);
  (void)madvise(data, bytes_.size(), MADV_HUGEPAGE);
}

void MappedFile::AskAhead(absl::string_view part) {
  static const uintptr_t page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(part.data()) / page_bytes * page_bytes;
  const auto end = reinterpret_cast<uintptr_t>(part.data()) + part.size();
  if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
}

void MappedFile::Load(const std::atomic<bool>& cancelled) const {
  if (bytes_.empty()) return;
  // A folio of the page cache keeps its size: small ones must go before large ones can come.
  ReleasePages();
  if (const int fd = open(path_.c_str(), O_RDONLY | O_CLOEXEC); fd >= 0) {
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
  }
  constexpr size_t kLargePage = size_t{2} << 20;
  for (size_t at = 0; at < bytes_.size() && !cancelled.load(); at += kLargePage) {
    (void)*static_cast<const volatile char*>(bytes_.data() + at);
  }
}

void MappedFile::ReleasePages() const {
  // Advice only: a failure keeps memory, not wrong bytes.
  if (!bytes_.empty())
    (void)madvise(const_cast<char*>(bytes_.data()), bytes_.size(), MADV_DONTNEED);
}

}  // namespace carrel
