// What a client hears of an answer that was cut short: with whom it ended, and that half of it never looks whole.
#include "http_api/answering.h"

#include "absl/status/status.h"
#include "common/test_util.h"
#include "gmock/gmock.h"
#include "kvstore/access/access.h"

namespace carrel::http_api {
namespace {

using serving::AnswerJob;
using testing::HasSubstr;
using testing::Not;

// A client that waits for its answer at a server that takes no more requests: nothing is wanted, all is heard.
class WaitingClient final : public HttpReply {
 public:
  void Send(int status, const std::string&, const std::string& body, const HttpFields&) override {
    status_ = status;
    heard_ = body;
  }
  void Begin(const std::string&) override { status_ = 200; }
  void Write(const std::string& piece) override { heard_ += piece; }
  void End() override {}
  bool gone() const override { return stopped; }

  int status() const { return status_; }
  const std::string& heard() const { return heard_; }
  bool stopped = false;

 private:
  int status_ = 0;
  std::string heard_;
};

class AnsweringTest : public testing::TestWithParam<bool> {
 protected:
  AnsweringTest() : admission_(kvstore::Access::OpenWithToken("token"), nullptr) {
    CompletionRequest request;
    request.stream = GetParam();
    kvstore::Caller caller;
    caller.key = "token";
    auto visit = std::make_shared<kvstore::Visit>(*admission_.Admit(caller, "Test.Answer"));
    answering_ =
        std::make_unique<Answering>(CompletionHead{.id = "1", .model = "m"}, request, client_,
                                    std::move(visit), std::vector<std::shared_ptr<void>>{});
    answering_->SetPrompt("doc", false, 3);
  }

  kvstore::Admission admission_;
  const std::shared_ptr<WaitingClient> client_ = std::make_shared<WaitingClient>();
  std::unique_ptr<Answering> answering_;
};

TEST_P(AnsweringTest, HalfAnAnswerAsTheServerStops_IsNotToldAsAWholeOne) {
  EXPECT_TRUE(answering_->Push("half"));
  client_->stopped = true;
  EXPECT_FALSE(answering_->Push(" of"));
  AnswerJob::Done done;
  done.text = "half of";
  done.left = true;
  answering_->Done(done);
  EXPECT_THAT(client_->heard(), HasSubstr("the server is stopping"));
  EXPECT_THAT(client_->heard(), Not(HasSubstr("[DONE]")));
  EXPECT_EQ(client_->status(), GetParam() ? 200 : 503);
}

TEST_P(AnsweringTest, AnAnswerThatNobodyWantedAsTheServerStopped_FailsWithThat) {
  client_->stopped = true;
  EXPECT_FALSE(answering_->Wanted());
  answering_->Done(absl::CancelledError("nobody wants the answer any more"));
  EXPECT_EQ(client_->status(), 503);
  EXPECT_THAT(client_->heard(), HasSubstr("the server is stopping"));
}

INSTANTIATE_TEST_SUITE_P(StreamedOrNot, AnsweringTest, testing::Bool());

}  // namespace
}  // namespace carrel::http_api
