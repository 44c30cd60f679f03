// What:   a failed allocation as the status of what was tried, where a large one depends on input.
// Errors: ResourceExhausted "what: out of memory".
// Edge:   only what f itself throws on this thread: a loop that runs elsewhere has one of its own.
#pragma once

#include <new>
#include <stdexcept>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace carrel {

absl::Status NoMemoryStatus(absl::string_view what);

// f() gives a Status or a StatusOr.
template <typename F>
auto CatchNoMemory(absl::string_view what, F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return NoMemoryStatus(what);
  } catch (const std::length_error&) {  // a size beyond what any allocation can have
    return NoMemoryStatus(what);
  }
}

// An allocation that fails where nothing catches it ends the process with exit code 1 and a message
// on standard error, instead of an abort. For main.
void ExitWhenMemoryEnds();

}  // namespace carrel
