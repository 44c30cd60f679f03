// push and pull that are killed with -9 at random points, in a bucket of this process and on SeaweedFS: nothing
// half is visible, the same command goes on, and what is left over goes. CARREL_TRIALS=50 for more.
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <random>

#include "absl/time/clock.h"
#include "tests/bucket_world.h"

namespace carrel::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

int Trials(int usual) {
  const char* given = std::getenv("CARREL_TRIALS");
  return given == nullptr ? usual : std::atoi(given);
}

class BucketFaultTest : public StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    random_.seed(TestSeed());
    content_id_ = JsonOf(Carrel({"inspect", kKept, "--store", store_, "--json"}))["content_id"];
  }
  Command InBucket(const Args& args) const {
    return {.args = args, .environment = BucketEnvironment(endpoint_)};
  }
  // How long the command takes, which succeeds.
  absl::Duration TimeOf(const Args& args) const {
    const absl::Time start = absl::Now();
    EXPECT_THAT(Carrel(InBucket(args)), Succeeds());
    return absl::Now() - start;
  }
  bool KillAtRandom(const Args& args, absl::Duration usual) {
    const auto process = Process::Start(InBucket(args));
    absl::SleepFor(usual * (static_cast<double>(random_() % 1000) / 900));
    const bool running = process->Running();
    process->Signal(SIGKILL);
    process->Wait();
    return running;
  }
  // Whether the context is visible; then all of it is right.
  bool ExpectNothingHalf() const {
    const json verified =
        JsonOf(Carrel(InBucket({"verify", "--store", kBucketUri, "--deep", "--json"})));
    EXPECT_EQ(verified["damaged"], 0) << verified;
    if (verified["contexts"].empty()) return false;
    EXPECT_EQ(verified["contexts"][0]["content_id"], content_id_);
    return true;
  }
  void KillPushes() {
    const Args push = {"push", kKept, kBucketUri, "--store", store_, "--quiet"};
    const Args rm = {"rm", kKept, "--store", kBucketUri};
    const absl::Duration usual = TimeOf(push);
    EXPECT_THAT(Carrel(InBucket(rm)), Succeeds());
    int killed = 0, visible = 0;
    const int trials = Trials(5);
    for (int trial = 0; trial < trials; ++trial) {
      killed += KillAtRandom(push, usual) ? 1 : 0;
      visible += ExpectNothingHalf() ? 1 : 0;
      EXPECT_THAT(Carrel(InBucket(push)), Succeeds());
      EXPECT_TRUE(ExpectNothingHalf());
      // Records of the dead hold files for two minutes: rm frees the name, gc the rest.
      EXPECT_THAT(Carrel(InBucket(rm)), Succeeds());
      EXPECT_FALSE(ExpectNothingHalf());
    }
    std::cout << trials << " pushes, " << killed << " killed, " << visible << " visible by then"
              << std::endl;
  }
  void KillPulls() {
    ASSERT_THAT(Carrel(InBucket({"push", kKept, kBucketUri, "--store", store_})), Succeeds());
    const std::string other = path("other");
    const Args pull = {"pull", kKept, kBucketUri, "--store", other, "--quiet"};
    const absl::Duration usual = TimeOf(pull);
    int killed = 0;
    const int trials = Trials(5);
    for (int trial = 0; trial < trials; ++trial) {
      fs::remove_all(other);
      killed += KillAtRandom(pull, usual) ? 1 : 0;
      if (fs::exists(other + "/db/CURRENT")) {
        // A store that was being made is no store yet; the next pull makes it.
        const Outcome verified = Carrel({"verify", "--store", other, "--deep", "--json"});
        if (verified.err.find("not a store") == std::string::npos) {
          const json listed = JsonOf(verified);
          EXPECT_EQ(listed["damaged"], 0);
          if (!listed["contexts"].empty()) continue;
        }
      }
      EXPECT_THAT(Carrel(InBucket(pull)), Succeeds());
      EXPECT_EQ(JsonOf(Carrel({"inspect", kKept, "--store", other, "--json"}))["content_id"],
                content_id_);
      EXPECT_TRUE(fs::is_empty(other + "/importing"));
    }
    std::cout << trials << " pulls, " << killed << " killed" << std::endl;
  }

  kvstore::FakeS3 fake_;
  std::string endpoint_ = fake_.endpoint();
  std::string content_id_;
  std::mt19937_64 random_;
};

TEST_F(BucketFaultTest, Push_KilledAnywhere_ShowsNothingHalfAndGoesOn) {
  KillPushes();
  fake_.Age(absl::Hours(1));
  EXPECT_THAT(Carrel(InBucket({"gc", "--store", kBucketUri, "--grace", "1m"})), Succeeds());
  EXPECT_EQ(fake_.Objects().size(), 0u);
  EXPECT_EQ(fake_.open_uploads(), 0);
}

TEST_F(BucketFaultTest, Pull_KilledAnywhere_PublishesAllOrNothing) { KillPulls(); }

TEST_F(BucketFaultTest, OnSeaweed_PushAndPull_KilledAnywhere) {
  const auto server = StartSeaweed(path("seaweed"));
  if (server == nullptr) GTEST_SKIP() << "this machine has no weed";
  endpoint_ = server->endpoint();
  KillPushes();
  KillPulls();
}

// A push that is running holds its files, however short the grace of a sweep beside it.
TEST_F(BucketFaultTest, SweepsBesidePushes_TakeNothingThatIsNeeded) {
  for (int trial = 0; trial < Trials(3); ++trial) {
    const auto push =
        Process::Start(InBucket({"push", kKept, kBucketUri, "--store", store_, "--quiet"}));
    int sweeps = 0;
    while (push->Running()) {
      EXPECT_THAT(Carrel(InBucket({"gc", "--store", kBucketUri, "--grace", "0s"})), Succeeds());
      ++sweeps;
    }
    EXPECT_THAT(push->Wait(), Succeeds());
    EXPECT_TRUE(ExpectNothingHalf()) << sweeps << " sweeps";
    EXPECT_THAT(Carrel(InBucket({"rm", kKept, "--store", kBucketUri})), Succeeds());
  }
}

}  // namespace
}  // namespace carrel::cli
