#include "kvstore/storage/read_aside.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/status.h"

namespace carrel::kvstore {

absl::Status ReadAside(const MappedFile& file, int64_t offset, std::string& bytes) {
  bool from_disk = false;
  for (size_t done = 0; done < bytes.size();) {
    iovec rest{bytes.data() + done, bytes.size() - done};
    const auto at = static_cast<off_t>(offset + static_cast<int64_t>(done));
    ssize_t count = from_disk ? -1 : preadv2(file.fd(), &rest, 1, at, RWF_NOWAIT);
    if (count <= 0) {  // not cached, or not told by this kernel
      from_disk = true;
      count = pread(file.fd(), rest.iov_base, rest.iov_len, at);
    }
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      return absl::DataLossError(absl::StrCat(file.path(), ": read at byte ", at, ": ",
                                              count < 0 ? strerror(errno) : "the file ends"));
    }
    done += static_cast<size_t>(count);
  }
  if (from_disk) {
    (void)posix_fadvise(file.fd(), offset, static_cast<off_t>(bytes.size()), POSIX_FADV_DONTNEED);
  }
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
