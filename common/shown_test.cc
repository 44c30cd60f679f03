#include "common/shown.h"

#include "common/test_util.h"

namespace carrel {
namespace {

TEST(ShownTest, Text_IsCutAtACharacterAndEscaped) {
  EXPECT_EQ(Shown("report"), "report");
  EXPECT_EQ(Shown("a\n\x1b]0;x\x7f"), "a\\x0a\\x1b]0;x\\x7f");
  EXPECT_EQ(Shown("abcdef", 3), "abc... (6 bytes)");
  EXPECT_EQ(Shown("ab\xc3\xa9"
                  "d",
                  3),
            "ab... (5 bytes)");
  EXPECT_EQ(Shown("\x80\x80\x80\x80", 2), "... (4 bytes)");
  EXPECT_LT(Shown(std::string(1 << 20, 'x')).size(), 160u);
}

}  // namespace
}  // namespace carrel
