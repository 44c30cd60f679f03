// docs/trust.md names a test for everything that it promises: each exists.
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "common/file.h"
#include "common/test_util.h"

namespace carrel {
namespace {

namespace fs = std::filesystem;

std::set<std::string> AllTests() {
  static const std::regex pattern("TEST(_F|_P)?\\(\\s*(\\w+),\\s*(\\w+)\\)");
  std::set<std::string> tests;
  for (const char* folder : {"common", "kernels", "model", "kvstore", "audit", "prefill", "synth",
                             "decoder", "tools", "tests"}) {
    for (const auto& entry :
         fs::recursive_directory_iterator(fs::path(CARREL_SOURCE_DIR) / folder)) {
      if (entry.path().extension() != ".cc") continue;
      const auto text = ReadFile(entry.path().string());
      if (!text.ok()) continue;
      for (std::sregex_iterator it(text->begin(), text->end(), pattern), end; it != end; ++it) {
        tests.insert((*it)[2].str() + "." + (*it)[3].str());
      }
    }
  }
  return tests;
}

TEST(TrustTest, EveryTestThatIsNamed_Exists) {
  const std::set<std::string> tests = AllTests();
  ASSERT_GT(tests.size(), 500u) << "the scan does not see the tree";
  const auto text = ReadFile(std::string(CARREL_SOURCE_DIR) + "/docs/trust.md");
  CARREL_ASSERT_OK(text);
  static const std::regex name("`(\\w+Test\\.\\w+)`");
  int named = 0;
  for (std::sregex_iterator it(text->begin(), text->end(), name), end; it != end; ++it, ++named) {
    EXPECT_TRUE(tests.contains((*it)[1].str())) << (*it)[1].str();
  }
  EXPECT_GE(named, 12);
}

// The table of classes: twelve rows, each with a mechanism and a test.
TEST(TrustTest, EachPublishedClass_HasATest) {
  const auto text = ReadFile(std::string(CARREL_SOURCE_DIR) + "/docs/trust.md");
  CARREL_ASSERT_OK(text);
  std::istringstream lines(*text);
  int classes = 0;
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("## ", 0) == 0)
      inside = line == "## Twelve published ways to corrupt a KV cache";
    if (!inside || line.rfind("| ", 0) != 0 || line.rfind("| class", 0) == 0) continue;
    EXPECT_NE(line.find("Test."), std::string::npos) << line;
    ++classes;
  }
  EXPECT_EQ(classes, 12);
}

}  // namespace
}  // namespace carrel
