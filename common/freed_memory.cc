#include "common/freed_memory.h"

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

void UseFewHeaps() {
#if defined(__GLIBC__)
  mallopt(M_ARENA_MAX, 2);
#endif
}

void ReturnFreedMemory(int64_t least_bytes) {
#if defined(__GLIBC__)
  if (static_cast<int64_t>(mallinfo2().fordblks) >= least_bytes) malloc_trim(0);
#else
  static_cast<void>(least_bytes);
#endif
}

}  // namespace carrel
