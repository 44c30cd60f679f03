// What:    how soon a thread that has something to do gets a core on which others compute. Who asks the
//          kernel (EEVDF, Linux 6.12 and later) for short slices is let in as soon as he wakes; without,
//          he waits for the end of a slice, which is looked at every tick: up to 4 ms. Shares of the
//          cores stay as they are. Older kernels ignore it.
// Errors:  none: what is refused changes nothing.
// Threads: of the calling thread; those that it starts later inherit it.
#pragma once

namespace carrel {

// For threads that others wait for and that do little at a time.
void WakeSoon();
// For threads that work for long and that nobody waits for: usual slices, a smaller share. Once per
// thread; later calls cost nothing.
void WorkBehind();

}  // namespace carrel
