// carrel api on a disk that is full: a limit on the size of files is as good as one.
#include <signal.h>

#include <filesystem>

#include "tests/api_world.h"

namespace carrel::cli {
namespace {

// A layer's state of 7,700 tokens is more than that; that of 600 is not, nor are the 4 MiB that a store sets aside.
constexpr int64_t kMostFileBytes = 5000000;

TEST_F(ApiTest, ADocumentThatTheDiskDoesNotTake_IsTheServersError_AndLeavesNothing) {
  Start({}, kMostFileBytes);
  ASSERT_EQ(PostText("large", ReadBytes(DemoDocument("registry-8k"))).status, 202);
  const std::vector<json> events = Events("large");
  ASSERT_FALSE(events.empty());
  const json failed = events.back();
  EXPECT_EQ(failed["state"], "failed") << failed;
  EXPECT_EQ(failed["error"]["type"], "server_error") << failed;
  EXPECT_THAT(failed["error"]["message"].get<std::string>(), testing::HasSubstr("disk full"));
  EXPECT_TRUE(std::filesystem::is_empty(store_ + "/prefill"));
  // What was there is answered from, and what fits is taken in.
  EXPECT_EQ(json::parse(Post("/v1/completions", Completion()).body)["choices"][0]["text"], answer_);
  ASSERT_EQ(PostText("small", ReadBytes(DemoDocument("registry-512"))).status, 202);
  EXPECT_EQ(Events("small").back()["state"], "ready");
  // Listed until it is deleted, by whichever process.
  process_->Signal(SIGTERM);
  EXPECT_THAT(process_->Wait(), Succeeds());
  Start();
  EXPECT_EQ(State("large"), "failed");
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/large").status, 200);
  EXPECT_EQ(Contexts(), (Texts{"kept", "small"}));
  EXPECT_TRUE(std::filesystem::is_empty(store_ + "/waiting"));
}

}  // namespace
}  // namespace carrel::cli
