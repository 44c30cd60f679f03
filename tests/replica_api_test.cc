// carrel api and carrel serve whose contexts are in a bucket, as users and operators meet them.
#include <signal.h>

#include <atomic>
#include <regex>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_replace.h"
#include "common/checksum.h"
#include "tests/api_world.h"
#include "tests/bucket_world.h"

namespace carrel::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr int kFailed = 1, kUsage = 2;

class ReplicaApiTest : public ApiTest {
 protected:
  void SetUp() override {
    ApiTest::SetUp();
    ASSERT_THAT(InBucket({"push", kKept, kBucketUri, "--store", store_}), Succeeds());
    // The same document as another context.
    ASSERT_THAT(Carrel(Prefill("second", {"--store", path("more"), "--quiet"})), Succeeds());
    ASSERT_THAT(InBucket({"push", "second", kBucketUri, "--store", path("more")}), Succeeds());
    for (const auto& [key, bytes] : fake_.Objects()) bytes_ += static_cast<int64_t>(bytes.size());
  }
  void TearDown() override {
    holds_ = false;
    fake_.Intercept(nullptr);
  }

  Outcome InBucket(const Args& args) const {
    return Carrel(Command{.args = args, .environment = BucketEnvironment(fake_.endpoint())});
  }
  // cache_bytes: by default for both.
  void StartReplica(const Args& more = {}, const std::string& cache_bytes = "1GB") {
    const int64_t requests = fake_.requests();
    Command command;
    command.environment = BucketEnvironment(fake_.endpoint(), kSecret);
    command.args = With(With(With({"api", "--model", model_->folder(), "--listen", "127.0.0.1:0",
                                   "--model-name", "demo"},
                                  ReplicaOf(path("cache"), cache_bytes)),
                             rows_),
                        more);
    process_ = Process::Start(command);
    ASSERT_TRUE(WaitUntil(
        [&] { return process_->err().find("may") != std::string::npos || !process_->Running(); }));
    const std::string said = process_->err();
    const size_t at = said.find("http://");
    ASSERT_NE(at, std::string::npos) << said;
    address_ = said.substr(at + 7, said.find("/v1", at) - at - 7);
    // It has looked at the bucket's names: a list, and each of them.
    ASSERT_TRUE(WaitUntil([&] { return fake_.requests() >= requests + 3; }));
    absl::SleepFor(absl::Milliseconds(100));
  }
  // While it is held, no file of a context comes.
  void Hold() {
    holds_ = true;
    fake_.Intercept(
        [this](const kvstore::FakeRequest& request) -> std::optional<kvstore::FakeReply> {
          while (holds_ && absl::StrContains(request.key, ".sst")) {
            absl::SleepFor(absl::Milliseconds(5));
          }
          return std::nullopt;
        });
  }
  bool Resident(const std::string& name) {
    const json document = json::parse(Ask("GET", "/v1/contexts/" + name).body);
    return document.value("resident", false);
  }
  std::string Answered(const TestClient::Response& response) {
    const json body = json::parse(response.body, nullptr, false);
    return body.contains("choices") ? std::string(body["choices"][0]["text"]) : response.body;
  }

  static constexpr char kSecret[] = "SECRET-of-the-bucket";
  kvstore::FakeS3 fake_;
  std::atomic<bool> holds_{false};
  int64_t bytes_ = 0;  // of everything in the bucket
};

TEST_F(ReplicaApiTest, WhoAsks_WaitsForHisContext_AndIsToldSo) {
  Hold();
  StartReplica();
  EXPECT_THAT(Contexts(), testing::ElementsAre("kept", "second"));
  EXPECT_FALSE(Resident("kept"));
  TestClient::Response whole, streamed;
  std::thread one([&] { whole = Post("/v1/completions", Completion()); });
  std::thread two([&] { streamed = Post("/v1/completions", Completion({{"stream", true}})); });
  // Two wait, and no answer has begun; who asks without a context is answered meanwhile.
  EXPECT_EQ(Post("/v1/completions", {{"prompt", "x"}, {"max_tokens", 1}}).status, 200);
  EXPECT_TRUE(WaitUntil(
      [&] { return absl::StrContains(Ask("GET", "/metrics").body, "carrel_replica_waiting 2"); }));
  EXPECT_THAT(Ask("GET", "/metrics").body, HasSubstr("carrel_api_answers_running 0"));
  absl::SleepFor(absl::Milliseconds(2500));
  holds_ = false;
  one.join();
  two.join();
  EXPECT_EQ(Answered(whole), answer_);
  EXPECT_THAT(streamed.body, HasSubstr(": the context is fetched: "));
  EXPECT_THAT(streamed.body, HasSubstr("data: [DONE]"));
  EXPECT_TRUE(Resident("kept"));
  EXPECT_FALSE(Resident("second"));
  const std::string metrics = Ask("GET", "/metrics").body;
  EXPECT_THAT(metrics, HasSubstr("carrel_replica_pulls_total 1"));
}

TEST_F(ReplicaApiTest, SixtyFourWhoAskTheSame_CauseOnePull) {
  Hold();
  StartReplica();
  std::atomic<int> right{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < 64; ++i) {
    clients.emplace_back([&] {
      TestClient client(address_);
      client.Post("/v1/completions", Completion({{"max_tokens", 4}}).dump(), "");
      const TestClient::Response response = client.Receive();
      right += response.status == 200 ? 1 : 0;
    });
  }
  while (!absl::StrContains(Ask("GET", "/metrics").body, "carrel_replica_waiting 64")) {
    absl::SleepFor(absl::Milliseconds(20));
  }
  holds_ = false;
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(right, 64);
  EXPECT_THAT(Ask("GET", "/metrics").body, HasSubstr("carrel_replica_pulls_total 1"));
}

TEST_F(ReplicaApiTest, WithoutRoom_WhatNobodyReadsGoes_ThoughItsDecodersAreOpen) {
  StartReplica({}, std::to_string(bytes_ * 3 / 4));  // room for one
  EXPECT_EQ(Answered(Post("/v1/completions", Completion())), answer_);
  EXPECT_EQ(Answered(Post("/v1/completions", Completion({{"context", "second"}}))), answer_);
  EXPECT_TRUE(Resident("second"));
  EXPECT_FALSE(Resident("kept"));
  EXPECT_EQ(Answered(Post("/v1/completions", Completion())), answer_);
  EXPECT_TRUE(Resident("kept"));
  EXPECT_THAT(Ask("GET", "/metrics").body, HasSubstr("carrel_replica_evictions_total 2"));
}

TEST_F(ReplicaApiTest, WhatIsRemovedFromTheBucket_IsGoneSoon) {
  StartReplica();
  EXPECT_EQ(Answered(Post("/v1/completions", Completion())), answer_);
  const absl::Time start = absl::Now();
  ASSERT_THAT(InBucket({"rm", kKept, "--store", kBucketUri}), Succeeds());
  ASSERT_TRUE(WaitUntil([&] { return Post("/v1/completions", Completion()).status == 404; }));
  RecordProperty("gone_after_ms", static_cast<int>(absl::ToInt64Milliseconds(absl::Now() - start)));
  ASSERT_TRUE(WaitUntil([&] { return Contexts() == Texts{"second"}; }));
  ASSERT_TRUE(WaitUntil(
      [&] { return absl::StrContains(Ask("GET", "/metrics").body, "carrel_replica_contexts 0"); }));
}

TEST_F(ReplicaApiTest, Warm_AndReady) {
  Hold();
  StartReplica({"--warm", "kept"});
  EXPECT_EQ(Ask("GET", "/health").status, 200);
  EXPECT_EQ(Ask("GET", "/ready").status, 503);
  EXPECT_THAT(Ask("GET", "/metrics").body, HasSubstr("carrel_replica_warming 1"));
  const TestClient::Response soon = Ask("POST", "/v1/contexts/second/warm");
  EXPECT_EQ(soon.status, 202);
  EXPECT_EQ(json::parse(soon.body)["resident"], false);
  holds_ = false;
  ASSERT_TRUE(WaitUntil([&] { return Ask("GET", "/ready").status == 200; }));
  EXPECT_TRUE(Resident("kept"));
  const TestClient::Response done = Ask("POST", "/v1/contexts/second/warm?wait=60");
  EXPECT_EQ(done.status, 200);
  EXPECT_EQ(json::parse(done.body)["resident"], true);
  EXPECT_EQ(Ask("POST", "/v1/contexts/nobody/warm?wait=5").status, 404);
  EXPECT_EQ(Ask("POST", "/v1/contexts/second/warm?wait=601").status, 400);
  EXPECT_THAT(Carrel({"warm", "kept", "second", "--api", "http://" + address_}), Succeeds());
  EXPECT_THAT(Carrel({"warm", "nobody", "--api", "http://" + address_}),
              FailsWith(kFailed, Texts{"NOT_FOUND", "nobody"}));
}

TEST_F(ReplicaApiTest, ADocumentsText_IsFetched) {
  StartReplica();
  EXPECT_EQ(Ask("GET", "/v1/contexts/kept/text").body, ReadBytes(document_));
  EXPECT_TRUE(Resident("kept"));
}

TEST_F(ReplicaApiTest, WithoutTheBucket_WhatIsHereAnswers_AndOthersSaySoSoon) {
  StartReplica();
  EXPECT_EQ(Answered(Post("/v1/completions", Completion())), answer_);
  fake_.Intercept([](const kvstore::FakeRequest&) {
    return kvstore::FakeReply{.status = 503, .body = "<Error><Code>SlowDown</Code></Error>"};
  });
  EXPECT_EQ(Answered(Post("/v1/completions", Completion())), answer_);
  const TestClient::Response other = Post("/v1/completions", Completion({{"context", "second"}}));
  EXPECT_EQ(other.status, 503) << other.body;
  EXPECT_THAT(other.body, Not(HasSubstr(kSecret)));
  fake_.Intercept(nullptr);
  EXPECT_EQ(Answered(Post("/v1/completions", Completion({{"context", "second"}}))), answer_);
}

TEST_F(ReplicaApiTest, NobodyBringsOrDeletesADocumentHere) {
  StartReplica({"--anyone-may-add-and-delete"});
  const TestClient::Response brought = PostText("new", "A text.");
  EXPECT_EQ(brought.status, 409) << brought.body;
  EXPECT_THAT(brought.body, HasSubstr("carrel push"));
  EXPECT_NE(Ask("DELETE", "/v1/contexts/kept").status, 200);
  EXPECT_THAT(Contexts(), testing::ElementsAre("kept", "second"));
}

// The rights table with the bucket as one more transport: contexts elsewhere and here.
TEST_F(ReplicaApiTest, Keys_HoldForTheBucketsContexts_AndSecretsAreNowhere) {
  const std::string log = path("audit.jsonl");
  json entries = json::array();
  const auto key = [&](const std::string& name, const json& more) {
    json entry = {{"name", name}, {"sha256", Sha256Hex("KEY-" + name)}};
    entry.update(more);
    entries.push_back(entry);
  };
  for (const char* right : {"list", "open", "import", "delete", "admin"}) {
    key(right, {{"rights", {right}}});
  }
  key("team", {{"rights", {"list", "open"}}, {"contexts", "sec*"}});
  StartReplica(
      {"--keys", WriteFile("keys.json", json{{"keys", entries}}.dump()), "--audit-log", log});
  const auto as = [](const std::string& name) {
    return absl::StrCat("Authorization: Bearer KEY-", name, "\r\n");
  };
  std::string said;
  for (const char* where : {"elsewhere", "here"}) {
    for (const char* who : {"list", "open", "import", "delete", "admin", "stranger"}) {
      const std::string name = who;
      const int refused = name == "stranger" ? 401 : 403;
      const auto expect = [&](const TestClient::Response& response, int allowed, bool may) {
        EXPECT_EQ(response.status, may ? allowed : refused) << name << " " << response.body;
        said += response.body;
      };
      expect(Ask("GET", "/v1/contexts", as(name)), 200, name == "list");
      expect(Ask("GET", "/v1/contexts/kept", as(name)), 200, name == "list");
      expect(Ask("GET", "/metrics", as(name)), 200, name == "list");
      expect(Ask("POST", "/v1/contexts/kept/warm?wait=60", as(name)), 200, name == "open");
      expect(Post("/v1/completions", Completion({{"max_tokens", 1}}), as(name)), 200,
             name == "open");
      expect(PostText("new", "A text.", as(name)), 409, name == "import");
    }
    said += where;
  }
  // A context that a key does not see is not there, and is not brought for it.
  EXPECT_THAT(Contexts(as("team")), testing::ElementsAre("second"));
  const std::string hidden = Post("/v1/completions", Completion(), as("team")).body;
  const std::string absent =
      Post("/v1/completions", Completion({{"context", "absent"}}), as("team")).body;
  EXPECT_EQ(absl::StrReplaceAll(hidden, {{"kept", "NAME"}}),
            absl::StrReplaceAll(absent, {{"absent", "NAME"}}));
  EXPECT_EQ(Ask("POST", "/v1/contexts/kept/warm?wait=60", as("team")).status, 404);
  // An object store that repeats what it was sent.
  fake_.Intercept([](const kvstore::FakeRequest& request) -> std::optional<kvstore::FakeReply> {
    return kvstore::FakeReply{
        .status = 403,
        .body =
            absl::StrCat("<Error><Code>SignatureDoesNotMatch</Code><Message>",
                         request.headers.at("authorization"), " ", kSecret, "</Message></Error>")};
  });
  const TestClient::Response failed =
      Post("/v1/completions", Completion({{"context", "second"}}), as("open"));
  EXPECT_NE(failed.status, 200);
  EXPECT_EQ(failed.status, 503) << failed.body;  // no fault of the client's
  said += failed.body + hidden + absent + Ask("GET", "/metrics", as("list")).body;
  process_->Signal(SIGTERM);
  const Outcome ended = process_->Wait();
  EXPECT_THAT(ended, Succeeds());
  said += ended.out + ended.err + ReadBytes(log);
  EXPECT_THAT(said, HasSubstr("SignatureDoesNotMatch"));
  EXPECT_FALSE(std::regex_search(said, std::regex("Signature=[0-9a-f]")));
  for (const char* secret : {kSecret, "KEY-list", "KEY-open", "KEY-stranger"}) {
    EXPECT_THAT(said, Not(HasSubstr(secret)));
  }
}

TEST_F(ReplicaApiTest, FlagsThatDoNotGoTogether_AreRefused) {
  const Args base = {"api", "--model", model_->folder()};
  const auto refused = [&](const Args& more, const Texts& texts) {
    EXPECT_THAT(Carrel(With(base, more)), FailsWith(kUsage, texts));
  };
  refused({"--remote", kBucketUri}, {"--cache FOLDER"});
  refused({"--cache", path("c")}, {"--cache is of --remote"});
  refused({"--warm", "x", "--store", store_}, {"--warm is of --remote"});
  refused(With(ReplicaOf(path("c")), {"--warm", "a/b"}), {"--warm", "a/b"});
  refused(With(ReplicaOf(path("c")), {"--server", "unix:x"}), {"--server and --remote"});
  refused(With(ReplicaOf(path("c")), {"--store", store_}), {"--store and --remote"});
  refused(With(ReplicaOf(path("c")), {"--keep-documents", "3"}), {"--keep-documents"});
}

}  // namespace
}  // namespace carrel::cli
