#include "common/freed_memory.h"

#include <cstdint>
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

}  // namespace carrel
