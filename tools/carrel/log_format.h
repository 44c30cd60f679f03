// What:   how the program's log lines look: text for people, or one JSON object a line for machines:
//         {"time":"2026-11-23T19:00:00.123Z","level":"warning","thread":7,"message":"..."}.
//         Everything that was logged is in the message, with control characters and bytes that are no
//         UTF-8 escaped: a line is a line whatever a client calls itself.
// Errors: InvalidArgument an unknown format or level (names both, and what there is).
#pragma once

#include <string>

#include "absl/status/status.h"

namespace carrel::tools {

struct LogFlags {
  std::string format = "text";    // text, json
  std::string level = "warning";  // trace, debug, info, warning, error, off
};

// Sets spdlog's default logger, on standard error. Once, before threads log.
absl::Status SetUpLog(const LogFlags& flags);

}  // namespace carrel::tools
