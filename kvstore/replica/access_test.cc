// The bucket as one more transport: keys, tenants and what they see hold for contexts that come from there, and no
// secret is in what is said.
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <map>
#include <memory>
#include <regex>
#include <sstream>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/metrics.h"
#include "common/test_util.h"
#include "kvstore/remote/push.h"
#include "kvstore/remote/remote_test_util.h"
#include "kvstore/replica/residence.h"
#include "kvstore/replica/residence_test_util.h"
#include "kvstore/service/access_test_util.h"
#include "kvstore/service/metrics_text.h"
#include "kvstore/service/service_test_util.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

using grpc::StatusCode;

// A guarded server over an empty store, whose contexts "mine" and "theirs" are in a bucket.
class GuardedReplica {
  const std::string folder_ = FreshTempDir();

 public:
  explicit GuardedReplica(const char* keys, const std::string& tenants = "",
                          const Credentials& credentials = kTestCredentials)
      : server(folder_, Transport::kUnix, keys, tenants), credentials_(credentials) {
    const std::unique_ptr<Bucket> bucket = NewBucket();
    const auto source = MakeStore(folder_ + "/source", {server.mine.get(), server.theirs.get()});
    for (const char* name : {"mine", "theirs"}) {
      const auto from = source->Export(name);
      CARREL_CHECK(from.ok());
      CARREL_CHECK(PushContext(*bucket, **from, name, [](int64_t, int64_t) {}).ok());
    }
    server.store_name = "here";
    server.made_engine = [this](Engine& engine) {
      ResidenceConfig config;
      config.cache_bytes = int64_t{1} << 30;
      residence = *Residence::Create(config, NewBucket(), NewBucket(), TargetOf(engine));
      CARREL_EXPECT_OK(residence->Look());
      server.config.source = residence.get();
    };
    CARREL_EXPECT_OK(server.Start());
  }
  ~GuardedReplica() {
    server.server = nullptr;
    residence = nullptr;
    server.engine = nullptr;
  }

  FakeS3 fake;
  GuardedServer server;
  std::unique_ptr<Residence> residence;

 private:
  std::unique_ptr<Bucket> NewBucket() {
    return std::make_unique<Bucket>(TestClient(fake.endpoint(), credentials_), "");
  }
  const Credentials credentials_;
};

// TransportTest's table (kvstore/service/admission_test.cc), with contexts here and elsewhere.
TEST(ReplicaAccessTest, RightsTimesCallsTimesIdentities_OnlyTheRightOfTheCallOpensIt) {
  GuardedReplica replica(kOnePerRight);
  const std::vector<GuardedCall> calls = EveryCall(replica.server);
  // Nobody brings or deletes a context at a replica; what is not here is neither checked nor given out.
  std::map<std::string, StatusCode> allowed = {
      {"ContextService.Import", StatusCode::FAILED_PRECONDITION},
      {"ContextService.Delete", StatusCode::FAILED_PRECONDITION}};
  int64_t lines = 0;
  for (const char* where : {"elsewhere", "here"}) {
    const bool here = std::string(where) == "here";
    allowed["ContextService.Verify"] = here ? StatusCode::OK : StatusCode::NOT_FOUND;
    allowed["ContextService.Export"] = here ? StatusCode::OK : StatusCode::NOT_FOUND;
    for (const GuardedCall& call : calls) {
      const std::string rpc = call.rpc;
      const bool brings = rpc == "ContextService.Tokens" || rpc == "ContextService.Warm" ||
                          rpc == "RetrievalService.Session";
      if (!here && brings) continue;  // it would be here afterwards: below
      for (const char* key : {"list", "open", "import", "delete", "admin", "all"}) {
        const bool may = std::string(key) == call.right || std::string(key) == "all";
        const auto wanted = allowed.find(rpc);
        const grpc::Status status = call.make(key);
        EXPECT_EQ(status.error_code(), !may                      ? StatusCode::PERMISSION_DENIED
                                       : wanted != allowed.end() ? wanted->second
                                                                 : call.allowed)
            << rpc << " with " << key << ", " << where << ": " << status.error_message();
        lines += !may;
      }
      for (const char* key : {"wrong", "old", ""}) {
        EXPECT_EQ(call.make(key).error_code(), StatusCode::UNAUTHENTICATED) << rpc << " " << key;
        ++lines;
      }
    }
    if (!here) {
      EXPECT_FALSE(replica.residence->IsHere("mine"));
      CARREL_ASSERT_OK(BringAndWait(*replica.residence, "mine"));
    }
  }
  int64_t denied = 0;
  for (const std::string& line : replica.server.AuditLines()) {
    denied += absl::StrContains(line, "\"event\":\"denied\"");
  }
  EXPECT_EQ(denied, lines);
}

TEST(ReplicaAccessTest, ContextsOfOthers_AreAsThoseThatAreNotThere_AndAreNotBrought) {
  GuardedReplica replica(
      R"({"name": "k", "sha256": "%k%", "rights": ["list", "open"], "contexts": "mi*"})");
  const GuardedServer& server = replica.server;
  std::vector<std::string> names;
  EXPECT_TRUE(server.List("k", &names).ok());
  EXPECT_EQ(names, std::vector<std::string>{"mine"}) << "the bucket has two";
  const auto words = [](const grpc::Status& status, const std::string& name) {
    return absl::StrReplaceAll(absl::StrCat(status.error_code(), " ", status.error_message()),
                               {{name, "NAME"}});
  };
  const std::string wanted = "5 context NAME is not in the store";
  for (const char* name : {"theirs", "absent", "minot"}) {
    EXPECT_EQ(words(server.Get("k", name), name), wanted);
    EXPECT_EQ(words(server.Tokens("k", name), name), wanted);
    EXPECT_EQ(words(server.Warm("k", name), name), wanted);
    EXPECT_EQ(words(server.OpenSession("k", name), name), wanted);
    EXPECT_EQ(words(server.Export("k", name), name), wanted);
  }
  EXPECT_FALSE(replica.residence->IsHere("theirs"));
  EXPECT_TRUE(server.OpenSession("k", "mine").ok());
  EXPECT_TRUE(replica.residence->IsHere("mine"));
  // The same when another has had it brought.
  CARREL_ASSERT_OK(BringAndWait(*replica.residence, "theirs"));
  for (const char* name : {"theirs", "absent"}) {
    EXPECT_EQ(words(server.Warm("k", name), name), wanted);
    EXPECT_EQ(words(server.OpenSession("k", name), name), wanted);
  }
}

TEST(ReplicaAccessTest, SessionsOfATenant_CountThoseThatWaitForABucket) {
  GuardedReplica replica(
      R"({"name": "k", "sha256": "%k%", "tenant": "t", "rights": ["open"], "contexts": "*"})",
      R"({"name": "t", "prefix": "mi", "sessions": 2})");
  std::atomic<bool> holds{true};
  replica.fake.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
    while (holds && absl::StrContains(request.key, ".sst")) absl::SleepFor(absl::Milliseconds(2));
    return std::nullopt;
  });
  const absl::Cleanup lets_go = [&] {
    holds = false;
    replica.fake.Intercept(nullptr);
  };
  OpenRequest opening = replica.server.mine->Opening();
  WireSession first(replica.server.Channel(), "k"), second(replica.server.Channel(), "k");
  ASSERT_TRUE(first.SendOpen(WireOpen(opening)));
  ASSERT_TRUE(second.SendOpen(WireOpen(opening)));
  while (replica.residence->Statistics().waiting < 2) absl::SleepFor(absl::Milliseconds(2));
  const grpc::Status third = replica.server.Warm("k", "mine");
  EXPECT_EQ(third.error_code(), StatusCode::RESOURCE_EXHAUSTED) << third.error_message();
  holds = false;
  for (WireSession* const session : {&first, &second}) {
    const Parts parts = session->Receive(1);
    ASSERT_FALSE(parts.empty());
    EXPECT_TRUE(parts.back().has_open());
  }
}

// What reaches operators and clients while things go right and wrong, searched for what is nobody's.
TEST(ReplicaAccessTest, Secrets_AreInNoLogNoErrorAndNoMetric) {
  std::ostringstream log;
  const auto before = spdlog::default_logger();
  const auto logger = std::make_shared<spdlog::logger>(
      "seen", std::make_shared<spdlog::sinks::ostream_sink_mt>(log));
  logger->set_level(spdlog::level::trace);
  spdlog::set_default_logger(logger);
  const absl::Cleanup restores = [&] { spdlog::set_default_logger(before); };
  const Credentials credentials{"test-access", "SECRET-of-the-bucket", "TOKEN-of-the-session"};
  std::string said;
  std::vector<std::string> audit;
  {
    GuardedReplica replica(
        R"({"name": "k", "sha256": "%KEY-of-a-client%", "rights": ["list", "open"]})", "",
        credentials);
    const auto all = [&](const std::string& key) {
      for (const GuardedCall& call : EveryCall(replica.server)) {
        absl::StrAppend(&said, call.make(key).error_message(), "\n");
      }
      for (const char* name : {"theirs", "absent"}) {
        absl::StrAppend(&said, replica.server.OpenSession(key, name).error_message(), "\n");
      }
    };
    // An object store that repeats what it was sent.
    replica.fake.Intercept([](const FakeRequest& request) -> std::optional<FakeReply> {
      std::string headers;
      for (const auto& [name, value] : request.headers) absl::StrAppend(&headers, value, " ");
      return FakeReply{.status = 403,
                       .body = absl::StrCat("<Error><Code>SignatureDoesNotMatch</Code><Message>",
                                            headers, "SECRET-of-the-bucket</Message></Error>")};
    });
    all("KEY-of-a-client");
    all("KEY-of-a-stranger");
    EXPECT_FALSE(replica.residence->Look().ok());
    absl::StrAppend(&said, replica.residence->Look().message(), "\n");
    replica.fake.Intercept(nullptr);
    all("KEY-of-a-client");
    EXPECT_TRUE(replica.residence->IsHere("mine"));
    std::vector<MetricFamily> families = SnapshotMetrics();
    for (auto& family : ResidenceMetrics(replica.residence->Statistics())) {
      families.push_back(std::move(family));
    }
    absl::StrAppend(&said, MetricsText(families));
    audit = replica.server.AuditLines();
  }
  EXPECT_THAT(said, testing::HasSubstr("SignatureDoesNotMatch")) << "what went wrong is said";
  EXPECT_THAT(log.str(), testing::HasSubstr("pull of"));
  for (const std::string& line : audit) absl::StrAppend(&said, line, "\n");
  for (const char* secret :
       {"SECRET-of-the-bucket", "TOKEN-of-the-session", "KEY-of-a-client", "KEY-of-a-stranger"}) {
    EXPECT_THAT(said, testing::Not(testing::HasSubstr(secret)));
    EXPECT_THAT(log.str(), testing::Not(testing::HasSubstr(secret)));
  }
  const std::regex signature("Signature=[0-9a-f]");
  EXPECT_FALSE(std::regex_search(said + log.str(), signature));
}

}  // namespace
}  // namespace carrel::kvstore
