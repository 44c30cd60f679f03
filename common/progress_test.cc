#include "common/progress.h"

#include "common/test_util.h"

namespace carrel {
namespace {

TEST(FormatTest, DurationsAndBytes) {
  EXPECT_EQ(FormatClock(absl::Seconds(7)), "0:07");
  EXPECT_EQ(FormatClock(absl::Seconds(245)), "4:05");
  EXPECT_EQ(FormatClock(absl::Seconds(3723)), "1:02:03");
  EXPECT_EQ(FormatBytes(17), "17 B");
  EXPECT_EQ(FormatBytes(1536), "1.50 KiB");
  EXPECT_EQ(FormatBytes(int64_t{312} << 20), "312 MiB");
}

std::string Drawn(Progress::Mode mode) {
  FILE* file = std::tmpfile();
  {
    Progress progress(mode, file);
    progress.Update(0.25, "layer 1/4");
    progress.Step(0.5, "layer 2/4");
  }
  std::rewind(file);
  std::string text(4096, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

TEST(ProgressTest, EachMode_DrawsItsForm) {
  EXPECT_EQ(Drawn(Progress::Mode::kQuiet), "");
  EXPECT_EQ(Drawn(Progress::Mode::kLines), " 50%  layer 2/4\n");
  const std::string terminal = Drawn(Progress::Mode::kTerminal);
  EXPECT_THAT(terminal, testing::HasSubstr("\r 25% [######..................] layer 1/4"));
  EXPECT_THAT(terminal, testing::EndsWith("\r\033[K"));
}

}  // namespace
}  // namespace carrel
