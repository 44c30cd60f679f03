#include "common/no_memory.h"

#include <unistd.h>

#include <cstdlib>
#include <exception>

#include "absl/strings/str_cat.h"

namespace carrel {
namespace {

// Made before memory is short; its copies share it.
const absl::Status& Bare() {
  static const absl::Status* const status =
      new absl::Status(absl::StatusCode::kResourceExhausted, "out of memory");
  return *status;
}

std::terminate_handler before = nullptr;

[[noreturn]] void Terminate() {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::bad_alloc&) {
    constexpr char kMessage[] = "carrel: RESOURCE_EXHAUSTED: out of memory\n";
    if (write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1) < 0) _exit(1);
    _exit(1);
  } catch (...) {
  }
  if (before != nullptr) before();
  std::abort();
}

}  // namespace

absl::Status NoMemoryStatus(absl::string_view what) {
  try {
    return absl::ResourceExhaustedError(absl::StrCat(what, ": out of memory"));
  } catch (const std::bad_alloc&) {
    return Bare();
  }
}

void ExitWhenMemoryEnds() {
  Bare();
  before = std::set_terminate(&Terminate);
}

}  // namespace carrel
