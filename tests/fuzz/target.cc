#include "tests/fuzz/target.h"

#include <stdlib.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <utility>

namespace carrel::fuzz {
namespace {

std::vector<Target>& Registered() {
  static auto* targets = new std::vector<Target>;
  return *targets;
}

struct OwnFolder {
  OwnFolder() {
    const bool memory = std::filesystem::is_directory("/dev/shm");
    path = std::string(memory ? "/dev/shm" : "/tmp") + "/carrel-fuzz-XXXXXX";
    if (mkdtemp(path.data()) == nullptr) Fail("mkdtemp", __FILE__, __LINE__);
  }
  ~OwnFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::string path;
};

}  // namespace

const std::vector<Target>& Targets() {
  std::sort(Registered().begin(), Registered().end(),
            [](const Target& a, const Target& b) { return a.name < b.name; });
  return Registered();
}

bool Register(Target target) {
  Registered().push_back(std::move(target));
  return true;
}

const std::string& Folder() {
  static const OwnFolder folder;
  return folder.path;
}

std::string WriteInput(const std::string& name, absl::string_view bytes) {
  const std::filesystem::path path = std::filesystem::path(Folder()) / name;
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  CARREL_FUZZ_CHECK(file.good());
  return path.string();
}

std::pair<absl::string_view, absl::string_view> SplitAtNul(absl::string_view bytes) {
  const size_t nul = bytes.find('\0');
  if (nul == absl::string_view::npos) return {bytes, {}};
  return {bytes.substr(0, nul), bytes.substr(nul + 1)};
}

void Fail(const char* what, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: %s does not hold\n", file, line, what);
  std::abort();
}

}  // namespace carrel::fuzz
