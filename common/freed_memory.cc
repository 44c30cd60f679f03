#include "common/freed_memory.h"

#include <algorithm>
#include <limits>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace carrel {

void KeepFreedMemory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that it takes
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_ARENA_MAX, 1);
#endif
}

void ReturnFreedMemory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 20);
#endif
}

void UseFewHeaps() {
#if defined(__GLIBC__)
  mallopt(M_ARENA_MAX, 2);
#endif
}

bool FreedMemory::Look() {
#if defined(__GLIBC__)
  if (!LookAt(static_cast<int64_t>(mallinfo2().fordblks))) return false;
  malloc_trim(0);
  return true;
#else
  return false;
#endif
}

bool FreedMemory::LookAt(int64_t free_bytes) {
  least_bytes_ = looks_ == 0 ? free_bytes : std::min(least_bytes_, free_bytes);
  if (free_bytes < much_bytes_ && ++looks_ < kLooks) return false;
  looks_ = 0;
  return free_bytes >= much_bytes_ || least_bytes_ >= little_bytes_;
}

}  // namespace carrel
