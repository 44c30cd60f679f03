// What:   details of a status beside code and message: the field of the request, a code that clients look for, when to
//         retry, and that the machine lacks something (memory, disk). http_api turns these into the fields of its
//         errors.
// Edge:   OK stays OK; a detail that is there already stays, so the innermost one counts.
// Threads: reentrant.
// Example: return WithParam(absl::InvalidArgumentError("name: must not be empty"), "name");
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace carrel::serving {

// Codes that clients look for.
inline constexpr char kContextLengthExceeded[] = "context_length_exceeded";

// Sets a detail, and reads it; url: its name among the status's payloads.
absl::Status WithDetail(absl::Status status, const char* url, absl::string_view value);
std::string DetailOf(const absl::Status& status, const char* url);  // empty: none

// One message of a chat, or one field: "messages[3]".
absl::Status WithParam(absl::Status status, absl::string_view field);
std::string ParamOf(const absl::Status& status);
absl::Status WithCode(absl::Status status, absl::string_view code);
std::string CodeOf(const absl::Status& status);
absl::Status WithRetryAfter(absl::Status status, absl::Duration after);  // at least a second
std::optional<absl::Duration> RetryAfterOf(const absl::Status& status);

// Says of a ResourceExhausted that no rate, queue or quota of a caller's caused it, but the machine: a disk that is
// full (IsDiskFull), or anything else (memory, descriptors). Other statuses stay.
absl::Status OfMachine(absl::Status status);
bool IsOfMachine(const absl::Status& status);

}  // namespace carrel::serving
