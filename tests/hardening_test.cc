// The program that was built has what cmake/targets.cmake asks compiler and linker for: read from its ELF
// headers, symbols and code.
#include <array>
#include <cstdio>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/test_util.h"

namespace carrel {
namespace {

const std::string kProgram = std::string(CARREL_BINARY_DIR) + "/carrel";

std::string Output(const std::string& command) {
  std::string output;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return output;
  std::array<char, 4096> buffer;
  for (size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    output.append(buffer.data(), n);
  pclose(pipe);
  return output;
}

int Lines(const std::string& text, absl::string_view with) {
  int count = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n'))
    count += absl::StrContains(line, with);
  return count;
}

TEST(HardeningTest, Program_IsLoadedAnywhereAndItsTablesAreReadOnly) {
  const std::string headers = Output("readelf -hlW " + kProgram);
  EXPECT_THAT(headers, testing::ContainsRegex("Type: +DYN \\(Position-Independent Executable"));
  EXPECT_THAT(headers, testing::HasSubstr("GNU_RELRO"));
  EXPECT_THAT(headers, testing::ContainsRegex("GNU_STACK[ 0-9a-fx]+RW "));
  // Every symbol is bound at the start, so that nothing stays writable for it.
  const std::string dynamic = Output("readelf -dW " + kProgram);
  EXPECT_THAT(dynamic, testing::ContainsRegex("FLAGS_1.*NOW.*PIE"));
  EXPECT_EQ(Lines(dynamic, "RPATH") + Lines(dynamic, "TEXTREL"), 0);
}

TEST(HardeningTest, Code_ChecksItsStackAndItsBuffers) {
  if (!CARREL_HARDEN) GTEST_SKIP() << "built without CARREL_HARDEN";
  const std::string symbols = Output("nm -D --undefined-only " + kProgram);
  EXPECT_EQ(Lines(symbols, "__stack_chk_fail@"), 1);
  EXPECT_GE(Lines(symbols, "_chk@"), 5) << "calls of libc that know the size of their buffer";
  EXPECT_EQ(Lines(symbols, "__glibcxx_assert_fail"), 1) << "containers that check their bounds";
  // Indirect jumps land on what says so (CET): main is called by libc, our virtual functions by us.
  EXPECT_THAT(Output("objdump -d --no-show-raw-insn --disassemble=main " + kProgram),
              testing::HasSubstr("endbr64"));
}

// The most of our functions that have buffers on the stack; those of Debian's libraries are not counted.
TEST(HardeningTest, Objects_OfEveryFolderHaveStackProtectors) {
  if (!CARREL_HARDEN) GTEST_SKIP() << "built without CARREL_HARDEN";
  for (const char* folder : {"common", "model", "kvstore", "prefill", "decoder", "tools"}) {
    const std::string found =
        Output(absl::StrCat("find ", CARREL_BINARY_DIR, "/", folder,
                            " -name '*.o' -path '*/CMakeFiles/carrel_*' -exec nm --undefined-only "
                            "{} + | grep -c __stack_chk_fail"));
    EXPECT_GE(std::atoi(found.c_str()), 5) << folder << ": " << found;
  }
}

}  // namespace
}  // namespace carrel
