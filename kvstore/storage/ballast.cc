#include "kvstore/storage/ballast.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace carrel::kvstore {

void Ballast::Make() const {
  struct stat info;
  const int64_t has = stat(path_.c_str(), &info) == 0 ? info.st_size : 0;
  if (has >= kBytes) return;
  const int fd = open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;
  // Allocated, not only as long: a hole would take no room.
  int64_t made = has;
  for (int64_t bytes = kBytes; bytes > has && bytes >= kBytes / 8; bytes /= 2) {
    if (fallocate(fd, 0, 0, bytes) != 0) continue;
    made = bytes;
    break;
  }
  close(fd);
  if (made == 0) unlink(path_.c_str());
}

bool Ballast::Free() const { return unlink(path_.c_str()) == 0; }

}  // namespace carrel::kvstore
