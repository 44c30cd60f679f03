// The doorbell over a NATS server, where the machine has one; and without one.
#include "serving/jobs/nats_doorbell.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/test_util.h"
#include "serving/jobs/nats_test_server.h"

namespace carrel::serving {
namespace {

using absl::StatusCode;
using testing::HasSubstr;
using testing::Not;

bool Heard(const Doorbell& bell) {
  for (int i = 0; i < 3000; ++i) {
    if (bell.Hears()) return true;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return false;
}

TEST(NatsDoorbellTest, ARing_WakesWhoWaits) {
  const auto server = NatsServer::Start();
  if (server == nullptr) GTEST_SKIP() << "this machine has no nats-server";
  const std::string subject = SubjectOf("s3://bucket/a");
  const auto hears = ConnectNats(server->url(), "", subject, true),
             rings = ConnectNats(server->url(), "", subject, false),
             other = ConnectNats(server->url(), "", SubjectOf("s3://bucket/b"), false);
  CARREL_ASSERT_OK(hears);
  CARREL_ASSERT_OK(rings);
  CARREL_ASSERT_OK(other);
  ASSERT_TRUE(Heard(**hears));
  EXPECT_FALSE((*rings)->Hears());
  (*hears)->Wait(absl::Milliseconds(1));  // of connecting
  CARREL_EXPECT_OK((*rings)->Ring());
  const absl::Time begun = absl::Now();
  (*hears)->Wait(absl::Minutes(10));
  EXPECT_LT(absl::Now() - begun, absl::Minutes(9)) << "it was woken";
  CARREL_EXPECT_OK((*other)->Ring());
}

// The server comes later, goes, and comes again: who waits is woken to look.
TEST(NatsDoorbellTest, AServerThatComesLater_IsConnectedTo) {
  auto server = NatsServer::Start();
  if (server == nullptr) GTEST_SKIP() << "this machine has no nats-server";
  const std::string url = server->url();
  server->Kill();
  const auto hears = ConnectNats(url, "", "carrel.jobs.x", true);
  CARREL_ASSERT_OK(hears);
  EXPECT_FALSE((*hears)->Hears());
  EXPECT_THAT((*hears)->Ring(), StatusIs(StatusCode::kUnavailable, "ringing"));
  for (int i = 0; i < 2; ++i) {
    server->Restart();
    ASSERT_TRUE(Heard(**hears));
    (*hears)->Wait(absl::Minutes(10));
    server->Kill();
    for (int wait = 0; (*hears)->Hears() && wait < 3000; ++wait) {
      absl::SleepFor(absl::Milliseconds(10));
    }
    EXPECT_FALSE((*hears)->Hears());
  }
}

TEST(NatsDoorbellTest, AddressesThatAreNone_AreNamedWithoutTheirSecrets) {
  EXPECT_THAT(ConnectNats("http://h", "", "s", true),
              StatusIs(StatusCode::kInvalidArgument, "http://h"));
  EXPECT_THAT(ConnectNats("nats://", "", "s", true),
              StatusIs(StatusCode::kInvalidArgument, "nats"));
  const auto bell = ConnectNats("nats://anna:geheim@127.0.0.1:1", "", "s", false);
  CARREL_ASSERT_OK(bell);
  const absl::Status rung = (*bell)->Ring();
  EXPECT_THAT(rung, StatusIs(StatusCode::kUnavailable, "nats://127.0.0.1:1"));
  EXPECT_THAT(std::string(rung.message()), Not(HasSubstr("geheim")));
  EXPECT_THAT(ConnectNats("x://anna:geheim@h", "", "s", true).status().ToString(),
              Not(HasSubstr("geheim")));
  EXPECT_NE(SubjectOf("s3://b/a"), SubjectOf("s3://b/c"));
  EXPECT_EQ(SubjectOf("s3://b/a"), SubjectOf("s3://b/a/"));
}

}  // namespace
}  // namespace carrel::serving
