#include "common/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

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
  ASSIGN_OR_RETURN(const FileIdentity identity, IdentifyFile(fd, path));
  const auto size = static_cast<size_t>(identity.size);
  void* data = nullptr;
  if (size > 0) {
    data = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) return ErrnoStatus(errno, absl::StrCat("mmap ", path));
  }
  std::move(close_fd).Cancel();
  return std::unique_ptr<MappedFile>(
      new MappedFile(path, fd, identity, absl::string_view(static_cast<const char*>(data), size)));
}

MappedFile::MappedFile(std::string path, int fd, const FileIdentity& opened_as,
                       absl::string_view bytes)
    : path_(std::move(path)), fd_(fd), opened_as_(opened_as), bytes_(bytes) {
  if (!bytes_.empty()) guard_ = std::make_unique<MappingGuard>(bytes_.data(), bytes_.size());
}

MappedFile::~MappedFile() {
  guard_.reset();
  if (!bytes_.empty()) munmap(const_cast<char*>(bytes_.data()), bytes_.size());
  close(fd_);
}

absl::Status MappedFile::CheckReadable() const {
  if (guard_ == nullptr || !guard_->damaged()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      path_, ": pages of the mapped file could not be read: it was truncated, or its disk fails"));
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
  (void)posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
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
