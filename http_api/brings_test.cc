#include "http_api/brings.h"

#include "common/test_util.h"
#include "kvstore/service/context_client.h"
#include "library/embedded_client.h"  // sessions

namespace carrel::http_api {
namespace {

// A store whose contexts come when the test says so.
class SlowStore final : public library::StoreAccess {
 public:
  absl::StatusOr<std::unique_ptr<retrieval::Session>> NewClient(ThreadPool*) override {
    return absl::UnimplementedError("no sessions");
  }
  absl::StatusOr<std::unique_ptr<kvstore::ContextClient>> NewContextClient(
      const std::string&) override {
    return absl::UnimplementedError("no client");
  }
  absl::StatusOr<std::vector<TokenId>> DocumentTokens(const std::string&,
                                                      const std::string&) override {
    return absl::UnimplementedError("no tokens");
  }
  bool brings() const override { return true; }
  std::shared_ptr<void> Bring(const std::string&, kvstore::ContextWaiter waiter) override {
    waiting.push_back(std::move(waiter));
    return std::make_shared<int>(0);
  }

  std::vector<kvstore::ContextWaiter> waiting;
};

// Requests that are on their way when a server stops come to it after its end.
TEST(BringsTest, End_TellsWhoWaits_AndWhoComesLater_Once) {
  SlowStore store;
  Brings brings(&store);
  std::vector<absl::Status> told;
  const auto waiter = [&] {
    return Brings::Waiter{
        .progress = nullptr,
        .done = [&](const absl::Status& status, std::shared_ptr<void>) { told.push_back(status); }};
  };
  brings.Bring("early", waiter());
  EXPECT_EQ(told.size(), 0);
  brings.End();
  ASSERT_EQ(told.size(), 1);
  EXPECT_THAT(told[0], StatusIs(absl::StatusCode::kUnavailable, "the server is stopping"));
  brings.Bring("late", waiter());
  ASSERT_EQ(told.size(), 2);
  EXPECT_THAT(told[1], StatusIs(absl::StatusCode::kUnavailable, "the server is stopping"));
  EXPECT_EQ(store.waiting.size(), 1);
  store.waiting[0].done(absl::OkStatus());  // it came, for nobody
  brings.End();
  EXPECT_EQ(told.size(), 2);
}

}  // namespace
}  // namespace carrel::http_api
