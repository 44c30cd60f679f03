// What:   absl::Status plumbing and the always-on CHECK.
// Errors: status for what input, disk, network or memory can cause; CARREL_CHECK for a broken
//         invariant (aborts, prints the line).
#pragma once

#include <cstdio>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#define CARREL_CONCAT_INNER(a, b) a##b
#define CARREL_CONCAT(a, b) CARREL_CONCAT_INNER(a, b)

#define RETURN_IF_ERROR(expr)                                         \
  do {                                                                \
    if (absl::Status status_ = (expr); !status_.ok()) return status_; \
  } while (false)

#define ASSIGN_OR_RETURN(lhs, expr) \
  ASSIGN_OR_RETURN_IMPL(CARREL_CONCAT(status_or_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr)    \
  auto tmp = (expr);                             \
  if (!tmp.ok()) return std::move(tmp).status(); \
  lhs = std::move(tmp).value()

#define CARREL_CHECK(condition)                                                              \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: broken invariant: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)

namespace carrel {

// The same code and payloads with "prefix: " before the message; OK stays OK.
absl::Status Annotate(const absl::Status& status, absl::string_view prefix);

// The status of a failed system call: NotFound, PermissionDenied, ResourceExhausted (ENOSPC, EDQUOT,
// EFBIG, EMFILE as common/resource_status.h has them, ENOMEM) or Unavailable; "what: strerror".
absl::Status ErrnoStatus(int error_number, absl::string_view what);

}  // namespace carrel
