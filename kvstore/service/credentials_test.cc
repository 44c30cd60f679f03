#include "kvstore/service/credentials.h"

#include <sys/stat.h>

#include <thread>

#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "common/file.h"
#include "common/test_util.h"
#include "kvstore/service/access_test_util.h"
#include "kvstore/service/service_test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

TEST(CredentialsTest, Loopback_IsWhatOnlyThisMachineReaches) {
  for (const char* host : {"127.0.0.1", "127.8.8.8", "localhost", "::1", "::ffff:127.0.0.1"}) {
    EXPECT_TRUE(IsLoopback({.host = host, .port = 1})) << host;
  }
  for (const char* host :
       {"0.0.0.0", "10.0.0.1", "::", "::ffff:10.0.0.1", "no.such.host.invalid"}) {
    EXPECT_FALSE(IsLoopback({.host = host, .port = 1})) << host;
  }
}

TEST(CredentialsTest, AddressThatStrangersReach_NeedsTlsAndCredentialsOrInsecure) {
  const ListenAddress open = {.host = "0.0.0.0", .port = 1};
  for (const bool tls : {false, true}) {
    for (const bool known : {false, true}) {
      const absl::Status status = CheckExposure(open, {.tls = tls, .callers_known = known});
      if (tls && known) {
        CARREL_EXPECT_OK(status);
        continue;
      }
      EXPECT_THAT(status, StatusIs(StatusCode::kFailedPrecondition, "listen 0.0.0.0:1"));
      const bool names_tls = std::string(status.message()).find("--tls-cert") != std::string::npos;
      const bool names_keys = std::string(status.message()).find("--keys") != std::string::npos;
      EXPECT_EQ(names_tls, !tls) << status;
      EXPECT_EQ(names_keys, !known) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("or --insecure"));
      CARREL_EXPECT_OK(CheckExposure(open, {.tls = tls, .callers_known = known, .insecure = true}));
    }
  }
  CARREL_EXPECT_OK(CheckExposure({.host = "127.0.0.1", .port = 1}, {}));
  CARREL_EXPECT_OK(CheckExposure({.unix_path = "/tmp/x"}, {}));
}

TEST(CredentialsTest, Server_RefusesToListenUnguarded) {
  GuardedServer server(FreshTempDir(), Transport::kLoopback, nullptr);
  server.config.listen = {"0.0.0.0:0"};
  EXPECT_THAT(server.Start(), StatusIs(StatusCode::kFailedPrecondition,
                                       "TLS (--tls-cert and --tls-key) and credentials"));
  server.config.insecure = true;
  CARREL_EXPECT_OK(server.Start());
}

TEST(CredentialsTest, UnixSocket_HasItsMode) {
  for (const uint32_t mode : {0600u, 0660u, 0777u}) {
    GuardedServer server(FreshTempDir(), Transport::kUnix, nullptr);
    if (mode != 0600) server.config.socket_mode = mode;  // 0600 is the default
    const mode_t before = umask(0);
    CARREL_ASSERT_OK(server.Start());
    umask(before);
    struct stat info;
    ASSERT_EQ(
        stat(std::string(absl::StripPrefix(server.server->addresses()[0], "unix:")).c_str(), &info),
        0);
    EXPECT_EQ(info.st_mode & 0777, mode);
  }
  GuardedServer server(FreshTempDir(), Transport::kUnix, nullptr);
  server.config.socket_mode = 01777;
  EXPECT_THAT(server.Start(), StatusIs(StatusCode::kInvalidArgument, "socket mode"));
}

TEST(CredentialsTest, StrangersOfTls_DoNotGetIn) {
  GuardedServer server(FreshTempDir(), Transport::kMutualTls, nullptr);
  CARREL_ASSERT_OK(server.Start());
  EXPECT_TRUE(server.List("").ok());
  const auto connects = [&](const std::string& ca, const TestAuthority::Pair& own) {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = ca;
    options.pem_cert_chain = own.certificate;
    options.pem_private_key = own.key;
    return HealthOf(
               grpc::CreateChannel(server.server->addresses()[0], grpc::SslCredentials(options)),
               "") == "SERVING";
  };
  const TestAuthority stranger;
  const auto own = server.authority.Issue({.common_name = "c"});
  EXPECT_TRUE(connects(server.authority.certificate(), own));
  EXPECT_FALSE(connects(server.authority.certificate(), {}));  // no certificate
  EXPECT_FALSE(connects(server.authority.certificate(),
                        stranger.Issue({.common_name = "c"})));  // of somebody else
  EXPECT_FALSE(connects(stranger.certificate(), own));  // the client does not trust the server
  EXPECT_NE(HealthOf(grpc::CreateChannel(server.server->addresses()[0],
                                         grpc::InsecureChannelCredentials()),
                     ""),
            "SERVING");
}

TEST(CredentialsTest, FilesThatAreWrong_AreNamedAtStart) {
  GuardedServer server(FreshTempDir(), Transport::kTls, nullptr);
  const std::string key = server.config.tls.key;
  server.config.tls.key.clear();
  EXPECT_THAT(server.Start(), StatusIs(StatusCode::kInvalidArgument, "needs its key"));
  server.config.tls.key = key + ".none";
  EXPECT_THAT(server.Start(), StatusIs(StatusCode::kNotFound, "key.pem.none"));
  server.config.tls = {.certificate = "", .key = key};
  EXPECT_THAT(server.Start(), StatusIs(StatusCode::kInvalidArgument, "no certificate"));
}

int NumberOf(const char* variable, int usual) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? usual : std::atoi(text);
}

// Certificates and keys change again and again while sessions ask and new ones come.
TEST(CredentialsTest, Rotation_NoSessionSeesAnError) {
  constexpr auto kConnecting = std::chrono::seconds(30);
  const int sessions = NumberOf("CARREL_ROTATION_SESSIONS", 8);
  const absl::Duration duration = absl::Seconds(NumberOf("CARREL_ROTATION_SECONDS", 4));
  const auto keys = [](int from) {
    return absl::StrCat(R"({"name": "k", "sha256": ["%key)", from, R"(%", "%key)", from + 1,
                        R"(%"], "rights": ["open"]})");
  };
  GuardedServer server(FreshTempDir(), Transport::kTls, keys(0).c_str());
  CARREL_ASSERT_OK(server.Start());
  std::atomic<int> key{0};
  std::atomic<bool> stop{false};
  std::atomic<int64_t> asked{0}, opened{0};
  std::vector<std::atomic<int>> uses(static_cast<size_t>(sessions));  // the key of each
  std::vector<std::thread> threads;
  for (int i = 0; i < sessions; ++i) {
    threads.emplace_back([&, i] {
      v1::FetchRows fetch;
      fetch.mutable_range()->set_end(20);
      // Half of them stay with the connection that they began with until the key changes.
      while (!stop) {
        const int mine = key;
        uses[static_cast<size_t>(i)] = mine;
        // gRPC 1.51 takes an errno of something else for that of connect now and then; it tries again.
        const auto channel = server.Channel();
        EXPECT_TRUE(channel->WaitForConnected(std::chrono::system_clock::now() + kConnecting));
        WireSession session(channel, absl::StrCat("key", mine));
        session.Open(server.mine->Opening());
        ++opened;
        for (uint64_t id = 2; !stop && key == mine && (i % 2 == 0 || id < 50); ++id) {
          EXPECT_TRUE(session.SendFetch(id, fetch));
          const Parts parts = session.Receive(id);
          ASSERT_FALSE(parts.empty()) << session.Finish().error_message();
          ASSERT_FALSE(parts.back().has_error());
          ++asked;
        }
        session.CloseSending();
        EXPECT_TRUE(session.Finish().ok());
      }
    });
  }
  const absl::Time end = absl::Now() + duration;
  int turn = 1;
  for (; absl::Now() < end; ++turn) {
    const int64_t reloads = server.config.access->generation();
    server.WriteKeys(keys(turn - 1));  // the key in use stays valid, the next one becomes so
    while (server.config.access->generation() == reloads) absl::SleepFor(absl::Milliseconds(1));
    server.WriteCertificate(server.authority.Issue({.common_name = "server", .dns = "localhost"}));
    absl::SleepFor(absl::Milliseconds(1500));  // both watchers have looked
    key = turn;
    // The next change withdraws the key before: its sessions would be ended, as they should be.
    for (const std::atomic<int>& used : uses) {
      while (used < turn && !testing::Test::HasFailure()) absl::SleepFor(absl::Milliseconds(1));
    }
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  std::printf(
      "rotation: %d at a time, %d turns of certificates and keys, %lld sessions, %lld requests\n",
      sessions, turn - 1, static_cast<long long>(opened), static_cast<long long>(asked));
  EXPECT_GT(asked, sessions);
}

TEST(CredentialsTest, NewCertificate_IsUsedAndABrokenOneIsNot) {
  const std::string dir = FreshTempDir();
  const TestAuthority authority;
  const absl::Time soon = absl::Now() + absl::Minutes(5), later = absl::Now() + absl::Minutes(50);
  TestAuthority::Write(dir, authority.Issue({.common_name = "s", .dns = "localhost", .end = soon}),
                       authority.certificate());
  auto tls =
      ServerTls::Create({dir + "/certificate.pem", dir + "/key.pem", ""}, absl::Milliseconds(1));
  CARREL_ASSERT_OK(tls);
  EXPECT_LT((*tls)->counters().expires, absl::Now() + absl::Minutes(6));
  CARREL_ASSERT_OK(WriteFileAtomically(dir + "/certificate.pem", "nothing"));
  while ((*tls)->counters().failed_reloads == 0) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_LT((*tls)->counters().expires, absl::Now() + absl::Minutes(6));
  const int64_t reloads = (*tls)->counters().reloads;
  TestAuthority::Write(dir, authority.Issue({.common_name = "s", .dns = "localhost", .end = later}),
                       authority.certificate());
  while ((*tls)->counters().reloads == reloads) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_GT((*tls)->counters().expires, absl::Now() + absl::Minutes(40));
}

}  // namespace
}  // namespace carrel::kvstore
