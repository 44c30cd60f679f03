// What:   one parser of ours under bytes that anybody may have written. libFuzzer drives it (driver.cc,
//         preset fuzz), and fuzz_test replays seeds, mutations of them and past findings in every build.
// Edge:   a target may refuse its input with any status; it must not crash, hang, leak, read outside
//         its bytes or take memory without bound. What it accepts it uses: looks up, searches, prints.
// Threads: one per process at a time.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace carrel::fuzz {

struct Target {
  std::string name;
  // One input. Whatever it writes, it writes below Folder().
  std::function<void(absl::string_view bytes)> run;
  // Inputs that are accepted, a few KB each: where mutation starts.
  std::function<std::vector<std::string>()> seeds;
};

// Those that are linked in, ordered by name.
const std::vector<Target>& Targets();

// Registers a target; at namespace scope, through CARREL_FUZZ_TARGET.
bool Register(Target target);
#define CARREL_FUZZ_TARGET(name, run, seeds)             \
  [[maybe_unused]] static const bool registered_##name = \
      ::carrel::fuzz::Register({#name, run, seeds})

// A folder of this process, in memory where there is /dev/shm; removed at exit.
const std::string& Folder();
// Writes Folder()/name, whose folder is created, and returns the path.
std::string WriteInput(const std::string& name, absl::string_view bytes);

// Splits an input for parsers of two files: what stands before and after the first NUL, the second empty where
// there is none.
std::pair<absl::string_view, absl::string_view> SplitAtNul(absl::string_view bytes);

// Ends the program: an invariant that a target checks does not hold.
#define CARREL_FUZZ_CHECK(condition)                                        \
  do {                                                                      \
    if (!(condition)) ::carrel::fuzz::Fail(#condition, __FILE__, __LINE__); \
  } while (false)
[[noreturn]] void Fail(const char* what, const char* file, int line);

}  // namespace carrel::fuzz
