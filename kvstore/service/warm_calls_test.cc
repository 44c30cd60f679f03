#include "kvstore/service/warm_calls.h"

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.grpc.pb.h"
#include "common/routing.h"
#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

// "here" is here after two words of progress, "slow" never, "none" nowhere.
class WarmService final : public v1::ContextService::Service {
 public:
  grpc::Status Warm(grpc::ServerContext* context, const v1::WarmRequest* request,
                    grpc::ServerWriter<v1::WarmReply>* writer) override {
    ++calls;
    if (request->name() == "none") return {grpc::StatusCode::NOT_FOUND, "there is none"};
    v1::WarmReply reply;
    reply.set_of(20);
    for (const int64_t bytes : {5, 10}) {
      reply.set_bytes(bytes);
      writer->Write(reply);
    }
    while (request->name() == "slow" && !context->IsCancelled())
      absl::SleepFor(absl::Milliseconds(1));
    reply.set_here(true);
    writer->Write(reply);
    return grpc::Status::OK;
  }

  std::atomic<int> calls{0};
};

// What a wait was told.
struct Told {
  ContextWaiter Waiter() {
    return {.progress = [this](const ContextComes& comes) { bytes.push_back(comes.bytes); },
            .done =
                [this](const absl::Status& status) {
                  here = status;
                  done.Notify();
                }};
  }

  std::vector<int64_t> bytes;  // of the thread that tells, until done
  absl::Status here;
  absl::Notification done;
};

class WarmCallsTest : public testing::Test {
 protected:
  WarmCallsTest() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address_, grpc::InsecureServerCredentials());
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
  }
  ~WarmCallsTest() override { server_->Shutdown(std::chrono::system_clock::now()); }

  std::shared_ptr<grpc::Channel> Channel() const {
    return grpc::CreateChannel(address_, grpc::InsecureChannelCredentials());
  }
  void AwaitCalls(int calls) const {
    while (service_.calls < calls) absl::SleepFor(absl::Milliseconds(1));
  }

  const std::string address_ = "unix:" + FreshTempDir() + "/s";
  WarmService service_;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(WarmCallsTest, TellsProgress_ThenThatItIsHere) {
  WarmCalls calls;
  Told here, none;
  const auto one = calls.Start(Channel(), "", "here", here.Waiter());
  const auto other = calls.Start(Channel(), "", "none", none.Waiter());
  here.done.WaitForNotification();
  none.done.WaitForNotification();
  CARREL_EXPECT_OK(here.here);
  EXPECT_THAT(here.bytes, testing::ElementsAre(5, 10));
  EXPECT_THAT(none.here, StatusIs(absl::StatusCode::kNotFound, "there is none"));
}

TEST_F(WarmCallsTest, NoServer_IsUnavailable) {
  server_->Shutdown(std::chrono::system_clock::now());
  WarmCalls calls;
  Told told;
  const auto one = calls.Start(Channel(), "", "here", told.Waiter());
  told.done.WaitForNotification();
  EXPECT_EQ(told.here.code(), absl::StatusCode::kUnavailable);
}

// The last that keeps a channel is then the thread that hears of its end.
TEST_F(WarmCallsTest, DroppedCalls_TakeTheirChannelsWithThem_AndTellNothing) {
  WarmCalls calls;
  Told told;
  for (int i = 0; i < 50; ++i) {
    std::shared_ptr<void> one = calls.Start(Channel(), "", "slow", told.Waiter());
    if (i % 2 == 0) AwaitCalls(i / 2 + 1);
    one = nullptr;
  }
  Told after;
  const auto last = calls.Start(Channel(), "", "here", after.Waiter());
  after.done.WaitForNotification();
  CARREL_EXPECT_OK(after.here);
  EXPECT_FALSE(told.done.HasBeenNotified());
}

TEST_F(WarmCallsTest, End_CancelsWhatRuns_AndTellsIt) {
  Told slow;
  std::shared_ptr<void> handle;
  {
    WarmCalls calls;
    handle = calls.Start(Channel(), "", "slow", slow.Waiter());
    AwaitCalls(1);
  }
  ASSERT_TRUE(slow.done.HasBeenNotified());
  EXPECT_FALSE(slow.here.ok());
  handle = nullptr;  // after the end
  { const WarmCalls none; }
}

}  // namespace
}  // namespace carrel::kvstore
