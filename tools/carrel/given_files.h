// What:   files that a command is given by name: the text of a document, or standard input; and whether the page with
//         which a long job ends can be written, asked at its beginning.
// Errors: InvalidArgument, naming the file: a folder, an empty document, what is no text; no name of a page. Those of
//         writing there.
// Threads: any.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace carrel::tools {

// input: a file, or "-". command: as messages show what to type, such as "carrel prefill --input -". What was not
// quite as given is told on standard error.
absl::StatusOr<std::string> ReadDocumentFile(const std::string& input, const std::string& command);

absl::Status CheckPage(const std::string& path);

}  // namespace carrel::tools
