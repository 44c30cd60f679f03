// carrel api's audit log as operators keep it: renamed, and begun anew.
#include <signal.h>

#include <filesystem>

#include "tests/api_world.h"

namespace carrel::cli {
namespace {

using testing::HasSubstr;

TEST_F(ApiTest, TheAuditLog_BeginsAnewOnSighup_AndWithoutOneATerminalsEndIsItsEnd) {
  const std::string log = path("audit.jsonl");
  Start({"--audit-log", log});
  ASSERT_EQ(Post("/v1/completions", Completion()).status, 200);
  std::filesystem::rename(log, log + ".1");
  process_->Signal(SIGHUP);
  ASSERT_TRUE(WaitUntil([&] { return std::filesystem::exists(log); }));
  ASSERT_EQ(Post("/v1/completions", Completion({{"max_tokens", 1}})).status, 200);
  for (const std::string& file : {log, log + ".1"}) {
    const std::string lines = ReadBytes(file);
    EXPECT_THAT(lines, HasSubstr("\"open\"")) << file;
    EXPECT_THAT(lines, HasSubstr("\"close\"")) << file;
    EXPECT_THAT(lines, HasSubstr("\"kept\"")) << file;
  }
  process_->Signal(SIGTERM);
  EXPECT_THAT(process_->Wait(), Succeeds());
  Start();
  process_->Signal(SIGHUP);
  EXPECT_EQ(process_->Wait().signal, SIGHUP);
}

}  // namespace
}  // namespace carrel::cli
