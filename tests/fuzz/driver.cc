// libFuzzer's two functions, for the target that the environment variable CARREL_FUZZ names (./run fuzz
// sets it). `--write-seeds FOLDER` writes the seeds of every target that is linked in to FOLDER/TARGET and
// ends, `--targets` prints their names; every other argument is libFuzzer's.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "tests/fuzz/target.h"

namespace {

using carrel::fuzz::Target;
using carrel::fuzz::Targets;

const Target* chosen = nullptr;

void WriteSeeds(const std::filesystem::path& folder) {
  for (const Target& target : Targets()) {
    std::filesystem::create_directories(folder / target.name);
    int number = 0;
    for (const std::string& seed : target.seeds()) {
      std::ofstream(folder / target.name / ("seed-" + std::to_string(number++)), std::ios::binary)
          << seed;
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc == 3 && std::strcmp((*argv)[1], "--write-seeds") == 0) {
    WriteSeeds((*argv)[2]);
    std::exit(0);
  }
  if (*argc == 2 && std::strcmp((*argv)[1], "--targets") == 0) {
    for (const Target& target : Targets()) std::puts(target.name.c_str());
    std::exit(0);
  }
  const char* name = std::getenv("CARREL_FUZZ");
  for (const Target& target : Targets()) {
    if (name != nullptr && target.name == name) chosen = &target;
  }
  if (chosen != nullptr) return 0;
  std::fprintf(stderr, "CARREL_FUZZ=%s is none of the targets (--targets lists them)\n",
               name == nullptr ? "" : name);
  std::exit(2);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  chosen->run({reinterpret_cast<const char*>(data), size});
  return 0;
}
