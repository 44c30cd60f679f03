// What:   what becomes of memory that is freed. By default the C library gives large pieces back to
//         the kernel at once, and each is cleared and mapped anew, page by page, when it is asked
//         for again: for builders and writers that use the same few megabytes for every head and
//         file this takes as long as half of their work.
// Edge:   a C library other than glibc: nothing is done.
// Threads: call before there are others: each of them would have a heap of its own, of at most 64
//         MB, which is given back when it is empty.
#pragma once

#include <cstdint>

namespace carrel {

// Pieces of up to 32 MB are kept for the next that asks, by any thread, until some 2 GB are free. A
// process then holds the most that it ever used at once.
void KeepFreedMemory();

// Pieces of 1 MB and more go back to the kernel when they are freed, and so does what is free at the
// end of a heap once it is 1 MB. By default both bounds grow with the largest piece that was ever
// freed, to 32 and 64 MB after one large request, and what is free at the end of a thread's heap
// (not the first) is never given back by malloc_trim. For a server; before there are threads.
void ReturnFreedMemory();

// Two heaps for all threads, where each thread would soon have one: a heap takes 64 MB of address
// space, used or not. For a process whose address space is limited; before there are threads.
void UseFewHeaps();

// Gives what is free in the heap back to the kernel: at once if it is much, and when nobody needed it
// for a while. For a server after a burst. Threads: one.
class FreedMemory {
 public:
  static constexpr int kLooks = 5;
  // much_bytes: given back at the next look. little_bytes: if that much was free at each of kLooks
  // looks; less is kept.
  FreedMemory(int64_t much_bytes, int64_t little_bytes)
      : much_bytes_(much_bytes), little_bytes_(little_bytes) {}

  // Every few seconds. Cost: some 10 us, and where something is given back as long as it takes to
  // clear it again when it is needed. True: something was given back.
  bool Look();
  // The same, of a heap in which so many bytes are free (Look asks the C library).
  bool LookAt(int64_t free_bytes);

 private:
  const int64_t much_bytes_, little_bytes_;
  int looks_ = 0;
  int64_t least_bytes_ = 0;  // free, of those looks
};

}  // namespace carrel
