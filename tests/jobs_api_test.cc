// Documents that clients bring to carrel api and that become jobs: whoever brought one, and wherever it was prefilled,
// every api shows it, and answers from it.
#include <signal.h>

#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "http_api/http_test_util.h"
#include "tests/jobs_world.h"

namespace carrel::cli {
namespace {

using http_api::TestClient;
using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

class JobsApiTest : public JobsTest {
 protected:
  // A server of the bucket's contexts, which every api of the test asks.
  void StartReplica() {
    address_ = "unix:" + SocketPath("replica");
    replica_ = Process::Start(InBucket({"serve", "--remote", kBucketUri, "--cache", path("cache"),
                                        "--cache-bytes", "1GB", "--listen", address_}));
    ASSERT_TRUE(WaitUntil([&] {
      return absl::StrContains(replica_->err(), "ready on") || !replica_->Running();
    })) << replica_->err();
  }
  // Its address.
  std::string StartApi(const Args& more = {"--anyone-may-add-and-delete"}) {
    apis_.push_back(
        Process::Start(InBucket(With({"api", "--model", DemoModel(), "--listen", "127.0.0.1:0",
                                      "--server", address_, "--jobs", kBucketUri, "--top-k", "all"},
                                     more))));
    Process& api = *apis_.back();
    EXPECT_TRUE(WaitUntil([&] { return absl::StrContains(api.err(), "/v1\n") || !api.Running(); }));
    const std::string said = api.err(), before = "http://";
    const size_t at = said.find(before);
    EXPECT_NE(at, std::string::npos) << said;
    return said.substr(at + before.size(), said.find("/v1", at) - at - before.size());
  }
  static TestClient::Response Call(const std::string& api, const std::string& method,
                                   const std::string& target, const std::string& headers = "") {
    TestClient client(api);
    client.Ask(method, target, headers);
    return client.Receive();
  }
  static TestClient::Response Bring(const std::string& api, const std::string& name,
                                    const std::string& text, const std::string& headers = "") {
    TestClient client(api);
    client.Post("/v1/contexts?name=" + name, text,
                absl::StrCat("Content-Type: text/plain\r\n", headers));
    return client.Receive();
  }
  static json Get(const std::string& api, const std::string& name) {
    return json::parse(Call(api, "GET", "/v1/contexts/" + name).body, nullptr, false);
  }
  std::string text() const { return ReadBytes(document_); }

  std::string address_;
  std::unique_ptr<Process> replica_;
  std::vector<std::unique_ptr<Process>> apis_;
};

TEST_F(JobsApiTest, ADocumentBroughtToOne_IsToldOfAndAnsweredByAnother) {
  StartReplica();
  const std::string one = StartApi(), two = StartApi();
  const TestClient::Response brought = Bring(one, "report", text());
  ASSERT_EQ(brought.status, 202) << brought.body;
  EXPECT_EQ(json::parse(brought.body)["state"], "queued");
  EXPECT_EQ(Get(two, "report")["state"], "queued");
  TestClient watcher(two);
  watcher.Ask("GET", "/v1/contexts/report/events");
  const auto worker = StartWorker("work");
  const TestClient::Response events = watcher.Receive();
  EXPECT_THAT(events.body, HasSubstr("\"state\":\"ready\""));
  EXPECT_THAT(events.body, HasSubstr("[DONE]"));
  // The replica has it once somebody opens it there.
  ASSERT_THAT(Carrel(Ask("report", {"--server", address_})), Succeeds());
  for (const std::string& api : {one, two}) {
    const json now = Get(api, "report");
    EXPECT_EQ(now["state"], "ready") << now;
    EXPECT_EQ(now["tokens"], kept_tokens_);
    TestClient client(api);
    client.Post(
        "/v1/completions",
        json{{"context", "report"}, {"prompt", kQuestion}, {"temperature", 0}, {"max_tokens", 64}}
            .dump());
    const TestClient::Response answered = client.Receive();
    ASSERT_EQ(answered.status, 200) << answered.body;
    const std::string said = json::parse(answered.body)["choices"][0]["text"];
    EXPECT_EQ(absl::StripAsciiWhitespace(said), absl::StripAsciiWhitespace(answer_));
  }
  EXPECT_EQ(Bring(two, "report", text()).status, 200) << "it is there";
  EXPECT_EQ(Bring(two, "report", "Another text.").status, 409);
  EXPECT_EQ(Bring(two, "other", text()).status, 409) << "it is read once";
  // It leaves the bucket, and then the replica.
  EXPECT_EQ(Call(two, "DELETE", "/v1/contexts/report").status, 200);
  EXPECT_EQ(Count("/names/") + Count("/contexts/"), 0);
  EXPECT_TRUE(WaitUntil([&] { return Call(one, "GET", "/v1/contexts/report").status == 404; }));
}

TEST_F(JobsApiTest, AJob_IsCancelledByAnother_AndWhoWaitsIsTold) {
  StartReplica();
  const std::string one = StartApi(), two = StartApi();
  ASSERT_EQ(Bring(one, "report", text()).status, 202);
  TestClient watcher(one);
  watcher.Ask("GET", "/v1/contexts/report/events");
  EXPECT_EQ(Call(two, "DELETE", "/v1/contexts/report").status, 200);
  const TestClient::Response events = watcher.Receive();
  EXPECT_THAT(events.body, HasSubstr("\"state\":\"failed\""));
  EXPECT_THAT(events.body, HasSubstr("cancelled"));
  EXPECT_EQ(Call(one, "GET", "/v1/contexts/report").status, 404);
  EXPECT_EQ(Count("/queue/") + Count("/documents/"), 0);
  // A failure is everybody's, too, until somebody deletes it.
  const std::string long_name = "again";
  ASSERT_EQ(Bring(one, long_name, text()).status, 202);
  EXPECT_THAT(Carrel(InBucket({"job", "cancel", long_name, "--remote", kBucketUri})), Succeeds());
  EXPECT_TRUE(
      WaitUntil([&] { return Call(two, "GET", "/v1/contexts/" + long_name).status == 404; }));
}

TEST_F(JobsApiTest, KeysHold_QuotasAreTheOwners_AndNoSecretIsInTheBucket) {
  StartReplica();
  const json anna = JsonOf(Carrel({"keys", "new", "anna", "--rights", "list,open,import,delete",
                                   "--tenant", "lab", "--json"})),
             reads = JsonOf(Carrel({"keys", "new", "reads", "--rights", "list,open", "--json"}));
  const auto write_keys = [&](const json& entries) {
    return WriteFile("keys.json",
                     json{{"keys", entries},
                          {"tenants", {{{"name", "lab"}, {"prefix", "lab-"}, {"contexts", 1}}}}}
                         .dump());
  };
  const std::string keys = write_keys({anna["entry"], reads["entry"]});
  const std::string one = StartApi({"--keys", keys}), two = StartApi({"--keys", keys});
  const std::string key = anna["key"];
  const std::string header = absl::StrCat("Authorization: Bearer ", key, "\r\n");
  const std::string reader =
      absl::StrCat("Authorization: Bearer ", std::string(reads["key"]), "\r\n");
  EXPECT_EQ(Bring(one, "lab-a", text()).status, 401);
  EXPECT_EQ(Bring(one, "lab-a", text(), reader).status, 403);
  EXPECT_EQ(Bring(one, "other", text(), header).status, 403) << "not the tenant's name";
  const TestClient::Response brought = Bring(one, "lab-a", text(), header);
  ASSERT_EQ(brought.status, 202) << brought.body;
  EXPECT_EQ(StatusOf("lab-a")["owner"], "anna");
  // The open job counts, here and at another api.
  for (const std::string& api : {one, two}) {
    ASSERT_TRUE(
        WaitUntil([&] { return Call(api, "GET", "/v1/contexts/lab-a", header).status == 200; }));
    const TestClient::Response more = Bring(api, "lab-b", "Another text.", header);
    EXPECT_EQ(more.status, 429) << more.body;
  }
  for (const auto& [name, bytes] : fake_.Objects()) EXPECT_THAT(bytes, Not(HasSubstr(key)));
  for (const auto& api : apis_) EXPECT_THAT(api->err(), Not(HasSubstr(key)));
  // The job ends with the key that brought it.
  write_keys({reads["entry"]});
  EXPECT_TRUE(WaitUntil([&] { return StatusOf("lab-a")["state"] == "cancelled"; }))
      << apis_[0]->err();
}

TEST_F(JobsApiTest, WrongUsage_IsNamed) {
  constexpr int kBad = 2;
  const Args api = {"api", "--model", DemoModel(), "--listen", "127.0.0.1:0"};
  const auto run = [&](const Args& more) { return Carrel(InBucket(With(api, more))); };
  EXPECT_THAT(run({"--jobs", kBucketUri, "--store", path("x")}),
              FailsWith(kBad, Texts{"--server"}));
  EXPECT_THAT(run({"--jobs", "x", "--server", "unix:/x"}), FailsWith(kBad, Texts{"s3://BUCKET"}));
  EXPECT_THAT(run({"--nats", "nats://x"}), FailsWith(kBad, Texts{"--jobs"}));
  EXPECT_THAT(run({"--s3-region", "x"}), FailsWith(kBad, Texts{"--s3-region"}));
}

}  // namespace
}  // namespace carrel::cli
