#include "common/test_util.h"

#include <unistd.h>

#include <filesystem>
#include <system_error>
#include <vector>

namespace carrel {
namespace {

// Files of this process's tests, which go with it unless a test failed. Not with a child of it.
class TemporaryFiles {
 public:
  static TemporaryFiles& Get() {
    static TemporaryFiles files;
    return files;
  }
  ~TemporaryFiles() {
    if (getpid() != process_ || !testing::UnitTest::GetInstance()->Passed()) return;
    std::error_code ignored;
    for (const std::string& path : paths_) std::filesystem::remove_all(path, ignored);
  }
  void Add(const std::string& path) { paths_.push_back(path); }

 private:
  const pid_t process_ = getpid();
  std::vector<std::string> paths_;
};

}  // namespace

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
  TemporaryFiles::Get().Add(safe);
  return safe;
}

std::string SocketPath(absl::string_view name) {
  const std::string path = absl::StrCat(testing::TempDir(), "carrel_", name, "_", getpid());
  TemporaryFiles::Get().Add(path);
  return path;
}

}  // namespace carrel
