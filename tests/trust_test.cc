// docs/trust.md names a test for everything that it promises: each exists.
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <vector>

#include "common/file.h"
#include "common/test_util.h"

namespace carrel {
namespace {

namespace fs = std::filesystem;

std::set<std::string> AllTests() {
  static const std::regex pattern("TEST(_F|_P)?\\(\\s*(\\w+),\\s*(\\w+)\\)");
  std::set<std::string> tests;
  for (const char* folder : {"common", "kernels", "model", "kvstore", "audit", "prefill", "synth",
                             "decoder", "library", "http_api", "serving", "tools", "tests"}) {
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

// Of the table below a heading, without its own: each must name a test.
std::vector<std::string> RowsBelow(const std::string& heading) {
  const auto text = ReadFile(std::string(CARREL_SOURCE_DIR) + "/docs/trust.md");
  CARREL_EXPECT_OK(text);
  std::istringstream lines(text.ok() ? *text : "");
  std::vector<std::string> rows;
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("## ", 0) == 0) inside = line == heading;
    if (inside && line.rfind("| ", 0) == 0) rows.push_back(line);
  }
  EXPECT_FALSE(rows.empty()) << heading;
  if (!rows.empty()) rows.erase(rows.begin());
  for (const std::string& row : rows) EXPECT_NE(row.find("Test."), std::string::npos) << row;
  return rows;
}

TEST(TrustTest, EachPublishedClass_HasATest) {
  EXPECT_EQ(RowsBelow("## Twelve published ways to corrupt a KV cache").size(), 12u);
}

TEST(TrustTest, EachFinding_HasATest) {
  const std::vector<std::string> rows = RowsBelow("## Eighteen findings of a review");
  ASSERT_EQ(rows.size(), 18u);
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].rfind(absl::StrCat("| F", i + 1, " "), 0), 0u) << rows[i];
  }
}

}  // namespace
}  // namespace carrel
