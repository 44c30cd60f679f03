#include "tools/carrel/page_file.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/status.h"

namespace carrel::tools {
namespace {

constexpr int64_t kProbedPageBytes = 1 << 20;

}  // namespace

absl::Status CheckPage(const std::string& path) {
  if (path.empty()) return absl::InvalidArgumentError("--html needs the name of a file");
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return absl::InvalidArgumentError(absl::StrCat("--html ", path, " is a folder"));
  }
  return Annotate(ProbeRoom(path, 0, kProbedPageBytes), "--html");
}

}  // namespace carrel::tools
