#include "http_api/page.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"

namespace carrel::http_api {
namespace {

size_t Count(const std::string& part) {
  return std::vector<std::string>(absl::StrSplit(Page(), part)).size() - 1;
}

TEST(PageTest, Parts_AreOneFile) {
  EXPECT_EQ(Count("<style>\n"), 1);
  EXPECT_EQ(Count("<script>\n"), 1);
  EXPECT_EQ(Count("@PAGE"), 0);
  for (const char* part : {"partsOf", "pump", "showDocuments", "answerOf", "readAddress();\n"}) {
    EXPECT_GE(Count(part), 1) << part;
  }
}

TEST(PageTest, Nothing_IsLoadedFromElsewhere) {
  EXPECT_EQ(Count("src="), 0);
  EXPECT_EQ(Count("href="), Count("href=\"data:,\"") + Count("href=\"#\""));
  EXPECT_EQ(Count("innerHTML"), 0);
  EXPECT_TRUE(absl::StartsWith(PagePolicy(), "default-src 'none'; script-src 'sha256-"))
      << PagePolicy();
  EXPECT_FALSE(absl::StrContains(PagePolicy(), "unsafe"));
}

}  // namespace
}  // namespace carrel::http_api
