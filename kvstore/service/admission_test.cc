// Who may do what, over the wire: every right, call and transport; what a caller is told.

#include "kvstore/access/admission.h"

#include <unistd.h>

#include <set>

#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/test_util.h"
#include "kvstore/service/access_test_util.h"
#include "kvstore/service/service_test_util.h"
#include "nlohmann/json.hpp"

namespace carrel::kvstore {
namespace {

using grpc::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class TransportTest : public testing::TestWithParam<Transport> {
 protected:
  std::unique_ptr<GuardedServer> Start(const char* keys, const std::string& tenants = "") {
    auto server = std::make_unique<GuardedServer>(FreshTempDir(), GetParam(), keys, tenants);
    CARREL_EXPECT_OK(server->Start());
    return server;
  }
};

INSTANTIATE_TEST_SUITE_P(Every, TransportTest,
                         testing::Values(Transport::kUnix, Transport::kLoopback, Transport::kTls,
                                         Transport::kMutualTls),
                         [](const auto& info) { return TransportName(info.param); });

TEST_P(TransportTest, RightsTimesCallsTimesIdentities_OnlyTheRightOfTheCallOpensIt) {
  const auto server = Start(kOnePerRight);
  const std::vector<GuardedCall> calls = EveryCall(*server);
  EXPECT_EQ(std::size(calls), RpcRights().size());  // every one
  int64_t lines = 0;
  const auto expect = [&](const GuardedCall& call, const std::string& rights,
                          const std::string& key) {
    const bool may = rights == call.right || rights == "all";
    const grpc::Status status = call.make(key);
    EXPECT_EQ(status.error_code(), may ? call.allowed : StatusCode::PERMISSION_DENIED)
        << call.rpc << " with " << rights << ": " << status.error_message();
    lines += !may;
  };
  for (const GuardedCall& call : calls) {
    EXPECT_EQ(RightName(*RightOf(call.rpc)), call.right);
    for (const char* key : {"list", "open", "import", "delete", "admin", "all"}) {
      expect(call, key, key);
    }
    for (const char* key : {"wrong", "old", ""}) {
      EXPECT_EQ(call.make(key).error_code(), StatusCode::UNAUTHENTICATED) << call.rpc << " " << key;
      ++lines;
    }
  }
  // Those who present no key: the user at the other end of the socket, a client's certificate.
  const std::string who = GetParam() == Transport::kUnix ? absl::StrCat("\"uid\": ", getuid())
                          : GetParam() == Transport::kMutualTls ? "\"certificate\": \"client\""
                                                                : "\"anonymous\": true";
  for (const char* right : {"list", "open", "import", "delete", "admin"}) {
    const int64_t reloads = server->config.access->generation();
    server->WriteKeys(absl::StrCat("{\"name\": \"me\", ", who, ", \"rights\": \"", right, "\"}"));
    while (server->config.access->generation() == reloads) absl::SleepFor(absl::Milliseconds(1));
    for (const GuardedCall& call : calls) expect(call, right, "");
  }
  EXPECT_EQ(HealthOf(server->Channel(), ""), "SERVING");  // probes have no key
  int64_t denied = 0;
  for (const std::string& line : server->AuditLines())
    denied += nlohmann::json::parse(line)["event"] == "denied";
  EXPECT_EQ(denied, lines);
}

TEST_P(TransportTest, WithoutKeys_StrangersDoNotDelete) {
  const auto server = Start(nullptr);
  EXPECT_EQ(server->List("").error_code(), StatusCode::OK);
  EXPECT_EQ(server->OpenSession("", "mine").error_code(), StatusCode::OK);
  const grpc::Status status = server->Delete("", "theirs");
  if (GetParam() == Transport::kUnix) {
    EXPECT_EQ(status.error_code(), StatusCode::OK);
  } else {
    EXPECT_EQ(status.error_code(), StatusCode::PERMISSION_DENIED);
    EXPECT_EQ(server->Get("", "theirs").error_code(), StatusCode::OK);
  }
}

TEST_P(TransportTest, ContextsOfOthers_AreAsThoseThatAreNotThere) {
  const auto server = Start(
      R"({"name": "k", "sha256": "%k%", "rights": ["list", "open", "delete"], "contexts": "mi*"})");
  std::vector<std::string> names;
  EXPECT_TRUE(server->List("k", &names).ok());
  EXPECT_THAT(names, ElementsAre("mine"));
  // The same words for a context that is there and one that is not, but for the name asked for.
  const auto words = [](const grpc::Status& status, const std::string& name) {
    std::string text = absl::StrCat(status.error_code(), " ", status.error_message());
    for (size_t at; (at = text.find(name)) != std::string::npos;)
      text.replace(at, name.size(), "NAME");
    return text;
  };
  EXPECT_EQ(words(server->Get("k", "theirs"), "theirs"),
            words(server->Get("k", "absent"), "absent"));
  EXPECT_EQ(words(server->Tokens("k", "theirs"), "theirs"),
            words(server->Tokens("k", "absent"), "absent"));
  EXPECT_EQ(words(server->Delete("k", "theirs"), "theirs"),
            words(server->Delete("k", "absent"), "absent"));
  EXPECT_EQ(words(server->OpenSession("k", "theirs"), "theirs"),
            words(server->OpenSession("k", "absent"), "absent"));
  EXPECT_EQ(words(server->Export("k", "theirs"), "theirs"),
            words(server->Export("k", "absent"), "absent"));
  EXPECT_EQ(words(server->Warm("k", "theirs"), "theirs"),
            words(server->Warm("k", "absent"), "absent"));
  EXPECT_EQ(words(server->Warm("k", "theirs"), "theirs"), "5 context NAME is not in the store");
  EXPECT_EQ(words(server->Export("k", "theirs"), "theirs"), "5 context NAME is not in the store");
  EXPECT_EQ(words(server->Get("k", "theirs"), "theirs"), "5 context NAME is not in the store");
  EXPECT_EQ(words(server->OpenSession("k", "theirs"), "theirs"),
            "5 context NAME is not in the store");
  EXPECT_TRUE(server->OpenSession("k", "mine").ok());
  // It is still there.
  server->WriteKeys(R"({"name": "k", "sha256": "%k%", "rights": ["list"]})");
  names.clear();
  while (names.size() < 2) {
    names.clear();
    EXPECT_TRUE(server->List("k", &names).ok());
  }
  EXPECT_THAT(names, ElementsAre("mine", "theirs"));
}

// A method that is added to a service without a right fails here, and is refused until it has one.
TEST(AdmissionTest, EveryMethodOfEveryService_HasARightAndNothingElseHas) {
  std::set<std::string> methods;
  for (const google::protobuf::FileDescriptor* file :
       {v1::Manifest::descriptor()->file(), v1::SessionRequest::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        methods.insert(
            absl::StrCat(file->service(s)->name(), ".", file->service(s)->method(m)->name()));
      }
    }
  }
  EXPECT_GE(methods.size(), 5u);
  for (const std::string& method : methods) CARREL_EXPECT_OK(RightOf(method));
  for (const RpcRight& row : RpcRights())
    EXPECT_TRUE(methods.contains(std::string(row.rpc))) << row.rpc;
}

TEST(AdmissionTest, ClientCertificate_IsItsEntry) {
  GuardedServer server(FreshTempDir(), Transport::kMutualTls,
                       R"({"name": "ann", "certificate": "ann.example", "rights": "list"})");
  CARREL_ASSERT_OK(server.Start());
  WireSession ann(server.ChannelAs("ann.example"));
  ann.SendOpen(WireOpen(server.mine->Opening()));
  EXPECT_EQ(ann.Finish().error_code(), StatusCode::PERMISSION_DENIED);  // known, without the right
  WireSession bob(server.ChannelAs("bob.example"));
  bob.SendOpen(WireOpen(server.mine->Opening()));
  EXPECT_EQ(bob.Finish().error_code(), StatusCode::UNAUTHENTICATED);
}

TEST(AdmissionTest, UserOfAUnixSocket_IsHisEntry) {
  const std::string mine =
      absl::StrCat(R"({"name": "me", "uid": )", getuid(), R"(, "rights": ["open"]})");
  const std::string other =
      absl::StrCat(R"({"name": "other", "uid": )", getuid() + 1, R"(, "rights": ["open"]})");
  GuardedServer server(FreshTempDir(), Transport::kUnix, mine.c_str());
  CARREL_ASSERT_OK(server.Start());
  EXPECT_TRUE(server.OpenSession("", "mine").ok());
  EXPECT_EQ(server.List("").error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(server.AuditLines()[0],
              HasSubstr(absl::StrCat("unix:uid=", getuid(), ",pid=", getpid())));
  const int64_t reloads = server.config.access->generation();
  server.WriteKeys(other);
  while (server.config.access->generation() == reloads) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(server.OpenSession("", "mine").error_code(), StatusCode::UNAUTHENTICATED);
}

// What a session may lose while it is open, and the words with which it then ends.
struct Withdrawal {
  const char* what;
  const char* before;  // entries beside that of "all"
  std::string after;
  const char* words;
};

std::vector<Withdrawal> Withdrawals() {
  const std::string me = absl::StrCat(getuid());
  return {
      {"Key", R"({"name": "k", "sha256": "%k%", "rights": "open"})", "", "key k was withdrawn"},
      {"OneOfTwoKeys", R"({"name": "k", "sha256": ["%k%", "%new%"], "rights": "open"})",
       R"({"name": "k", "sha256": "%new%", "rights": "open"})", "stands for it no more"},
      {"KeyIsAnothers", R"({"name": "k", "sha256": "%k%", "rights": "open"})",
       R"({"name": "j", "sha256": "%k%", "rights": "open"})", "key k was withdrawn"},
      {"Right", R"({"name": "k", "sha256": "%k%", "rights": ["open", "list"]})",
       R"({"name": "k", "sha256": "%k%", "rights": "list"})", "lacks the right open"},
      {"Context", R"({"name": "k", "sha256": "%k%", "rights": "open"})",
       R"({"name": "k", "sha256": "%k%", "rights": "open", "contexts": "theirs"})",
       "the context was withdrawn from it"},
      {"Time", R"({"name": "k", "sha256": "%k%", "rights": "open"})",
       R"({"name": "k", "sha256": "%k%", "rights": "open", "expires": "2020-01-01T00:00:00Z"})",
       "expired at 2020"},
  };
}

class WithdrawalTest : public testing::TestWithParam<Withdrawal> {
 protected:
  static constexpr char kAll[] =
      R"({"name": "all", "sha256": "%all%", "rights": ["list", "open"]})";
  static std::string With(const std::string& entry) {
    return entry.empty() ? kAll : absl::StrCat(kAll, ", ", entry);
  }
  void SetUp() override {
    server_ = std::make_unique<GuardedServer>(FreshTempDir(), Transport::kUnix,
                                              With(GetParam().before).c_str());
    CARREL_ASSERT_OK(server_->Start());
    fetch_.mutable_range()->set_end(10);
  }
  void Withdraw() {
    const int64_t reloads = server_->config.access->generation();
    server_->WriteKeys(With(GetParam().after));
    while (server_->config.access->generation() == reloads) absl::SleepFor(absl::Milliseconds(1));
  }
  void ExpectEnded(const grpc::Status& status) const {
    EXPECT_EQ(status.error_code(), StatusCode::PERMISSION_DENIED) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(GetParam().words));
  }

  std::unique_ptr<GuardedServer> server_;
  v1::FetchRows fetch_;
};

INSTANTIATE_TEST_SUITE_P(Every, WithdrawalTest, testing::ValuesIn(Withdrawals()),
                         [](const auto& info) { return std::string(info.param.what); });

TEST_P(WithdrawalTest, NextRequest_EndsTheSessionAndNoOther) {
  const auto channel = server_->Channel();
  WireSession session(channel, "k"), other(channel, "all");
  session.Open(server_->mine->Opening());
  other.Open(server_->mine->Opening());
  ASSERT_TRUE(session.SendFetch(2, fetch_));
  EXPECT_FALSE(session.Receive(2).empty());
  Withdraw();
  session.SendFetch(3, fetch_);
  EXPECT_TRUE(session.Receive(3).empty());
  ExpectEnded(session.Finish());
  ASSERT_TRUE(other.SendFetch(2, fetch_));
  EXPECT_FALSE(other.Receive(2).empty());
}

TEST_P(WithdrawalTest, QuietSession_IsEndedByThePeriodicCheck) {
  const auto channel = server_->Channel();
  WireSession session(channel, "k"), other(channel, "all");
  session.Open(server_->mine->Opening());
  other.Open(server_->mine->Opening());
  Withdraw();
  ExpectEnded(session.Finish());  // without a word from the client
  EXPECT_EQ(server_->server->statistics().sessions_withdrawn, 1);
  ASSERT_TRUE(other.SendFetch(2, fetch_));
  EXPECT_FALSE(other.Receive(2).empty());
  EXPECT_THAT(server_->AuditLines(), testing::Contains(HasSubstr(GetParam().words)));
}

TEST(AdmissionTest, Limits_BoundSessionsAndSlowRequests) {
  GuardedServer server(FreshTempDir(), Transport::kLoopback,
                       R"({"name": "k", "sha256": "%k%", "rights": ["list", "open"], "sessions": 1,
                           "requests_per_second": 50})");
  CARREL_ASSERT_OK(server.Start());
  const auto channel = server.Channel();
  WireSession session(channel, "k");
  session.Open(server.mine->Opening());
  const grpc::Status second = server.OpenSession("k", "mine");
  EXPECT_EQ(second.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(second.error_message(), HasSubstr("sessions=1"));
  // More than a second's worth at once: all are answered, some later, and none is refused.
  v1::FetchRows fetch;
  fetch.mutable_range()->set_end(10);
  for (uint64_t id = 2; id < 72; ++id) ASSERT_TRUE(session.SendFetch(id, fetch));
  for (uint64_t id = 2; id < 72; ++id) {
    const Parts parts = session.Receive(id);
    ASSERT_FALSE(parts.empty());
    EXPECT_FALSE(parts.back().has_error());
  }
  const Principal::Counts counts = server.config.access->Named("k")->counts();
  EXPECT_GT(counts.delayed, 0);
  EXPECT_EQ(counts.sessions, 1);
  // A call that is no session is refused instead.
  grpc::Status status;
  for (int i = 0; i < 200 && status.ok(); ++i) status = server.List("k");
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
}

TEST(AdmissionTest, AuditLog_HasALinePerOpenDeleteAndDenial) {
  GuardedServer server(FreshTempDir(), Transport::kUnix, R"(
      {"name": "ann", "sha256": "%ann%", "rights": ["list", "open", "delete"], "contexts": "mine", "tenant": "t"})",
                       R"({"name": "t", "prefix": "m"})");
  CARREL_ASSERT_OK(server.Start());
  const std::string content_id = server.engine->Get("mine")->content_id();
  EXPECT_EQ(content_id.size(), 64u);
  EXPECT_TRUE(server.OpenSession("ann", "mine").ok());
  EXPECT_FALSE(server.OpenSession("ann", "theirs").ok());
  EXPECT_FALSE(server.OpenSession("bob", "mine").ok());
  while (server.engine->sessions() > 0) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(server.Delete("ann", "mine").ok());
  EXPECT_FALSE(server.Delete("ann", "theirs").ok());
  std::map<std::string, std::vector<nlohmann::json>> events;
  while (server.AuditLines().size() < 6) absl::SleepFor(absl::Milliseconds(1));
  for (const std::string& text : server.AuditLines()) {
    const auto line = nlohmann::json::parse(text);
    events[line["event"]].push_back(line);
  }
  ASSERT_EQ(events["open"].size(), 1u);
  EXPECT_EQ(events["open"][0]["key"], "ann");
  EXPECT_EQ(events["open"][0]["tenant"], "t");
  EXPECT_EQ(events["open"][0]["context"], "mine");
  EXPECT_EQ(events["open"][0]["tokens"], 700);
  EXPECT_EQ(events["open"][0]["content_id"], content_id);
  EXPECT_EQ(events["open"][0]["result"], "OK");
  EXPECT_THAT(std::string(events["open"][0]["peer"]), HasSubstr("unix:"));
  ASSERT_EQ(events["close"].size(), 1u);
  EXPECT_GT(events["close"][0]["bytes"], 0);
  ASSERT_EQ(events["delete"].size(), 1u);
  EXPECT_EQ(events["delete"][0]["context"], "mine");
  EXPECT_EQ(events["delete"][0]["tokens"], 700);
  ASSERT_EQ(events["denied"].size(), 3u);  // the operator sees what the caller is not told
  EXPECT_EQ(events["denied"][0]["result"], "NOT_FOUND");
  EXPECT_EQ(events["denied"][0]["context"], "theirs");
  EXPECT_EQ(events["denied"][1]["result"], "UNAUTHENTICATED");
  EXPECT_EQ(events["denied"][1]["key"], "");
  EXPECT_EQ(events["denied"][2]["rpc"], "ContextService.Delete");
}

}  // namespace
}  // namespace carrel::kvstore
