#include "common/freed_memory.h"

#include <sys/auxv.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

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

void StartWithoutThreadCaches() {
#if defined(__GLIBC__)
  if (getauxval(AT_SECURE) != 0) return;  // a new program would not see what is set here
  constexpr char kName[] = "GLIBC_TUNABLES", kCount[] = "glibc.malloc.tcache_count";
  const char* const set = std::getenv(kName);
  std::string tunables = set == nullptr ? "" : set;
  if (tunables.find(kCount) != std::string::npos) return;
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string line{std::istreambuf_iterator<char>(file), {}};
  std::vector<char*> arguments;
  for (size_t at = 0; at < line.size(); at = line.find('\0', at) + 1) {
    arguments.push_back(&line[at]);
    if (line.find('\0', at) == std::string::npos) return;  // cut off
  }
  char program[4096];
  const ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
  if (arguments.empty() || length <= 0) return;
  program[length] = '\0';
  // A loader that was given us as a file is not us.
  const auto name_of = [](const std::string& path) { return path.substr(path.rfind('/') + 1); };
  if (name_of(program) != name_of(arguments[0])) return;
  tunables += (tunables.empty() ? "" : ":") + std::string(kCount) + "=0";
  if (setenv(kName, tunables.c_str(), 1) != 0) return;
  arguments.push_back(nullptr);
  execv(program, arguments.data());
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
