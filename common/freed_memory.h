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

// Two heaps for all threads, where each thread would soon have one: a heap takes 64 MB of address
// space, used or not. For a process whose address space is limited; before there are threads.
void UseFewHeaps();

// Gives back what is free in the heap, if that is at least so much. For a server after a burst, any
// time. Cost: some 10 us; if there is much, as long as it takes to clear it again when it is needed.
void ReturnFreedMemory(int64_t least_bytes);

}  // namespace carrel
