#include "tools/carrel/given_files.h"

#include <cstdio>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/file.h"
#include "common/status.h"
#include "library/text_kind.h"

namespace carrel::tools {
namespace {

constexpr int64_t kProbedPageBytes = 1 << 20;

}  // namespace

absl::StatusOr<std::string> ReadDocumentFile(const std::string& input, const std::string& command) {
  if (std::error_code error; std::filesystem::is_directory(input, error)) {
    return absl::InvalidArgumentError(absl::StrCat(
        input,
        ": not a regular file but a folder; a context is of one text: give each file a "
        "context of its own, or make one text of them: cat ",
        input, "/* | ", command));
  }
  ASSIGN_OR_RETURN(std::string bytes, ReadFile(input));
  if (bytes.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("the document ", input, " is empty"));
  }
  absl::StatusOr<library::GivenText> given = library::TakeText(
      std::move(bytes), input == "-" ? "FILE" : input, absl::StrCat(" | ", command));
  if (!given.ok()) return Annotate(given.status(), input);
  if (given->text.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("the document ", input, " is empty"));
  }
  if (!given->remark.empty()) {
    absl::FPrintF(stderr, "carrel: %s: %s\n", input, given->remark);
  }
  return std::move(given->text);
}

absl::Status CheckPage(const std::string& path) {
  if (path.empty()) return absl::InvalidArgumentError("--html needs the name of a file");
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return absl::InvalidArgumentError(absl::StrCat("--html ", path, " is a folder"));
  }
  return Annotate(ProbeRoom(path, 0, kProbedPageBytes), "--html");
}

}  // namespace carrel::tools
