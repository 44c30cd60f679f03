#include "common/shown.h"

#include "common/test_util.h"

namespace carrel {
namespace {

TEST(ShownTest, Text_IsCutAtACharacterAndEscaped) {
  EXPECT_EQ(Shown("report"), "report");
  EXPECT_EQ(Shown("a\n\x1b]0;x\x7f"), "a\\x0a\\x1b]0;x\\x7f");
  // Also what terminals and eyes take for one: CSI as U+009B, and text that runs backwards.
  EXPECT_EQ(Shown("a\xc2\x9b"
                  "2J\xe2\x80\xae\xd7\x90\xe2\x81\xa6\xe2\x80\xa8"),
            "a\\xc2\\x9b2J\\xe2\\x80\\xae\xd7\x90\\xe2\\x81\\xa6\\xe2\\x80\\xa8");
  EXPECT_EQ(Shown("\xc2\xa0\xe2\x80\x9c\xe2\x80\x8f\xe2\x81\xaa\xe2\x80"),
            "\xc2\xa0\xe2\x80\x9c\xe2\x80\x8f\xe2\x81\xaa\xe2\x80");
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
