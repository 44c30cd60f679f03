#include "common/test_folders.h"

#include <cstdlib>
#include <filesystem>

namespace carrel {

std::string SourceFolder() {
  const char* given = std::getenv("CARREL_SOURCE");
  return given != nullptr ? given : CARREL_SOURCE_DIR;
}

std::string SharedFolder() {
  const char* given = std::getenv("CARREL_SHARED");
  const std::string folder = given != nullptr ? given : SourceFolder() + "/../shared";
  std::error_code ignored;
  return std::filesystem::is_directory(folder, ignored) ? folder : "";
}

}  // namespace carrel
