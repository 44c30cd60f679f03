// What:   mapped files whose pages cannot be read (the file was truncated, its disk fails) do not
//         end the process. The kernel answers such a read by SIGBUS; our handler notes in the
//         mapping's guard that it is damaged and puts zeros in the place of the whole mapping, so
//         that whoever reads goes on, over zeros. So:
//           who reads a guarded mapping looks at damaged() afterwards, before what was read is used.
// Edge:   a SIGBUS elsewhere is named on stderr and passed to the handler that was there before
//         (the default: the process ends by the signal). The handler is installed with the first
//         guard; who installs another one later takes this one's place.
// Ownership: a guard owns its place in the table; the table is never freed.
// Threads: any. The handler takes no lock and no memory.
// Cost:   a guard is some 40 bytes that are used again, never freed.
#pragma once

#include <atomic>
#include <cstddef>

namespace carrel {

class MappingGuard {
 public:
  // Guards [begin, begin + bytes), whole pages of one mapping, from now until destruction, which
  // must precede munmap.
  MappingGuard(const void* begin, size_t bytes);
  ~MappingGuard();
  MappingGuard(const MappingGuard&) = delete;
  MappingGuard& operator=(const MappingGuard&) = delete;

  // Pages could not be read; the mapping holds zeros since.
  bool damaged() const;

  struct Place;  // of the handler's table

 private:
  Place* const place_;
};

}  // namespace carrel
