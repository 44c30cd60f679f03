// What:   the boundary at which an exception, which is never ours, becomes the error of one request. Every thread
//         that serves others has one at its entrance (HTTP, gRPC, pools, the step thread), and lives on.
// Errors: ResourceExhausted "what: out of memory" of a failed allocation, and "what: no thread can be started" where
//         the system gives none; Internal "what: an exception: .." of any other: a fault of ours, which is also said on
//         standard error.
// Edge:   only what f itself throws on this thread. ThreadPool::ParallelFor throws again, in its caller, what a unit
//         threw.
// Threads: reentrant.
// Example:
//   const absl::Status status = CatchThrown("request 42", [&] { return Handle(request); });
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/no_memory.h"

namespace carrel {

// Says on standard error what was thrown, and gives the status.
absl::Status ThrownStatus(absl::string_view what, const char* thrown);
absl::Status NoThreadStatus(absl::string_view what);

// f() gives a Status or a StatusOr.
template <typename F>
auto CatchThrown(absl::string_view what, F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return NoMemoryStatus(what);
  } catch (const std::length_error&) {  // a size beyond what any allocation can have
    return NoMemoryStatus(what);
  } catch (const std::system_error& thrown) {
    if (thrown.code() == std::errc::resource_unavailable_try_again) return NoThreadStatus(what);
    return ThrownStatus(what, thrown.what());
  } catch (const std::exception& thrown) {
    return ThrownStatus(what, thrown.what());
  } catch (...) {
    return ThrownStatus(what, "of an unknown kind");
  }
}

}  // namespace carrel
