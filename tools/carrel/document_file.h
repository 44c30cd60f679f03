// What:   the text of a document that a command is given as a file, or on standard input.
// Errors: InvalidArgument, naming the file: a folder, an empty file, what is no text.
// Threads: any.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace carrel::tools {

// input: a file, or "-". command: as messages show what to type, such as "carrel prefill --input -". What was not
// quite as given is told on standard error.
absl::StatusOr<std::string> ReadDocumentFile(const std::string& input, const std::string& command);

}  // namespace carrel::tools
