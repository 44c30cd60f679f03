#include "common/test_util.h"

#include <unistd.h>

#include <filesystem>

namespace carrel {

std::string FreshTempDir() {
  const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
  const std::string path = absl::StrCat(testing::TempDir(), "carrel_", test->test_suite_name(), "_",
                                        test->name(), "_", getpid());
  std::string safe = path;
  for (size_t i = testing::TempDir().size(); i < safe.size(); ++i) {
    if (safe[i] == '/') safe[i] = '_';
  }
  std::filesystem::remove_all(safe);
  std::filesystem::create_directories(safe);
  return safe;
}

}  // namespace carrel
