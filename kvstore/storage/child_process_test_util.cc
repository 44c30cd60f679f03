#include "kvstore/storage/child_process_test_util.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "common/status.h"

namespace carrel::kvstore {
namespace {

constexpr char kFolderVariable[] = "CARREL_CHILD_FOLDER=";

}  // namespace

ChildProcess::ChildProcess(const std::string& test, const std::string& folder) {
  std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  std::string filter = "--gtest_filter=" + test;
  std::string disabled = "--gtest_also_run_disabled_tests";
  std::string variable = kFolderVariable + folder;
  std::vector<char*> arguments = {program.data(), filter.data(), disabled.data(), nullptr};
  std::vector<char*> environment = {variable.data()};
  for (char** at = environ; *at != nullptr; ++at) environment.push_back(*at);
  environment.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  CARREL_CHECK(posix_spawn(&pid_, program.c_str(), &actions, nullptr, arguments.data(),
                           environment.data()) == 0);
  posix_spawn_file_actions_destroy(&actions);
}

ChildProcess::~ChildProcess() { Kill(); }

bool ChildProcess::Kill() {
  if (pid_ < 0) return false;
  kill(pid_, SIGKILL);
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

std::string ChildFolder() {
  const std::string name = std::string(kFolderVariable, sizeof(kFolderVariable) - 2);
  const char* folder = std::getenv(name.c_str());
  return folder == nullptr ? "" : folder;
}

bool WaitForFile(const std::string& path) {
  for (int i = 0; i < 6000; ++i) {
    if (std::filesystem::exists(path)) return true;
    usleep(10000);
  }
  return false;
}

}  // namespace carrel::kvstore
