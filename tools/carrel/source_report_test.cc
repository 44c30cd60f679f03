#include "tools/carrel/source_report.h"

#include "common/test_util.h"

namespace carrel::tools {
namespace {

TEST(HarmlessTest, WhatSteersATerminal_IsNotShown) {
  EXPECT_EQ(Harmless("two\n\tlines, caf\xc3\xa9"), "two\n\tlines, caf\xc3\xa9");
  EXPECT_EQ(Harmless("\x1b]0;title\x07\x7f\r"), "?]0;title???");
  // CSI as one character of its own, and what turns the direction of text.
  EXPECT_EQ(Harmless("\xc2\x9b"
                     "31m"),
            "?31m");
  EXPECT_EQ(Harmless("\xe2\x80\xae"
                     "gpj.exe\xe2\x81\xa9"),
            "?gpj.exe?");
}

TEST(SourcesTableTest, ASource_IsALine_WhateverItHolds) {
  std::vector<serving::AnswerSource> sources(1);
  sources[0].share = 0.5;
  sources[0].text =
      "a\nb\xc2\x9b"
      "2J \x1b[1m\xe2\x80\xae x";
  EXPECT_EQ(SourcesTable(sources, 100), "[1] 50%  a b?2J ?[1m? x\n");
}

}  // namespace
}  // namespace carrel::tools
