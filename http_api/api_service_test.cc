// carrel api in this process, with the demo model: who may do what over HTTP, and what any body is answered.
#include "http_api/api_service.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/file.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "http_api/http_message.h"
#include "http_api/http_test_util.h"
#include "kvstore/access/access.h"
#include "kvstore/access/audit_log.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using Response = TestClient::Response;

constexpr char kText[] = "The badge number of Ada is 4711. The badge number of Ben is 1234. ";

std::shared_ptr<library::LoadedModel> Demo() {
  static const auto model =
      *library::LoadedModel::Load(SourceFolder() + "/models/demo", "", /*threads=*/2);
  return model;
}

class ApiServiceTest : public testing::Test {
 protected:
  // keys: the entries of a keys file, %NAME% standing for the SHA-256 of the key NAME; null: none, but a token.
  void Start(const char* keys, const std::string& tenants = "",
             const std::function<void(ApiConfig&)>& change = nullptr) {
    service_ = nullptr;
    ApiConfig config;
    config.model_name = "demo";
    config.http.listen = {"127.0.0.1:0", "unix:" + socket_};
    if (keys == nullptr) {
      config.access = kvstore::Access::OpenWithToken("token");
    } else {
      WriteKeys(keys, tenants);
      access_ = *kvstore::Access::Create(keys_file_, absl::Milliseconds(50));
      config.access = access_;
    }
    audit_ = *kvstore::AuditLog::Open(folder_ + "/audit");
    config.audit = audit_.get();
    config.engine.scheduler.decoders.folder = config.engine.documents->address.folder =
        folder_ + "/store";
    config.engine.documents->writable = true;
    config.engine.scheduler.decoders.config.want = decoder::RetrievalConfig().want;
    if (change) change(config);
    library::StoreAddress address;
    address.folder = folder_ + "/store";
    store_ = nullptr;
    auto store = library::StoreAccess::Open(address, kvstore::StoreMode::kReadWrite);
    CARREL_ASSERT_OK(store.status());
    store_ = *std::move(store);
    auto service = ApiService::Start(config, Demo(), store_);
    CARREL_ASSERT_OK(service.status());
    service_ = *std::move(service);
    address_ = service_->addresses()[0];
  }
  ~ApiServiceTest() override { service_ = nullptr; }

  void WriteKeys(std::string keys, const std::string& tenants = "") {
    for (const char* name : {"list", "open", "import", "delete", "admin", "all", "old", "a", "b"}) {
      absl::StrReplaceAll(
          {{absl::StrCat("%", name, "%"), absl::BytesToHexString(kvstore::AccessKeySha256(name))}},
          &keys);
    }
    CARREL_ASSERT_OK(WritePrivateFile(
        keys_file_, absl::StrCat("{\"keys\": [", keys, "], \"tenants\": [", tenants, "]}")));
  }

  static std::string Bearer(const std::string& key) {
    return key.empty() ? "" : absl::StrCat("Authorization: Bearer ", key, "\r\n");
  }
  Response Ask(const std::string& method, const std::string& target, const std::string& key = "") {
    TestClient client(address_);
    client.Ask(method, target, Bearer(key));
    return client.Receive();
  }
  Response Post(const std::string& target, const std::string& body, const std::string& key = "",
                const std::string& type = "application/json") {
    TestClient client(address_);
    client.Post(target, body, absl::StrCat("Content-Type: ", type, "\r\n", Bearer(key)));
    return client.Receive();
  }
  // A context, ready.
  void Bring(const std::string& name, const std::string& key, const std::string& text = kText) {
    const Response added = Post("/v1/contexts?name=" + name, text, key, "text/plain");
    ASSERT_EQ(added.status, 202) << added.body;
    const absl::Time until = absl::Now() + absl::Seconds(60);
    std::string state;
    while (state != "ready" && absl::Now() < until) {
      state = json::parse(Ask("GET", "/v1/contexts/" + name, key).body).value("state", "");
      absl::SleepFor(absl::Milliseconds(5));
    }
    ASSERT_EQ(state, "ready");
  }
  std::vector<json> AuditLines() {
    std::vector<json> lines;
    for (const absl::string_view line :
         absl::StrSplit(*ReadFile(folder_ + "/audit"), '\n', absl::SkipEmpty())) {
      lines.push_back(json::parse(line));
    }
    return lines;
  }
  static std::string Question(int max_tokens, bool stream = false,
                              const std::string& context = "mine") {
    return json{{"context", context},
                {"prompt", " Who"},
                {"max_tokens", max_tokens},
                {"stream", stream},
                {"temperature", 0}}
        .dump();
  }

  const std::string folder_ = FreshTempDir(), socket_ = SocketPath();
  const std::string keys_file_ = folder_ + "/keys.json";
  std::shared_ptr<kvstore::Access> access_;
  std::unique_ptr<kvstore::AuditLog> audit_;
  std::shared_ptr<library::StoreAccess> store_;
  std::unique_ptr<ApiService> service_;
  std::string address_;
};

constexpr char kOnePerRight[] = R"(
  {"name": "L", "sha256": "%list%", "rights": ["list"]},
  {"name": "O", "sha256": "%open%", "rights": ["open"]},
  {"name": "I", "sha256": "%import%", "rights": ["import"]},
  {"name": "D", "sha256": "%delete%", "rights": ["delete"]},
  {"name": "A", "sha256": "%admin%", "rights": ["admin"]},
  {"name": "all", "sha256": "%all%", "rights": ["list", "open", "import", "delete", "admin"]},
  {"name": "old", "sha256": "%old%", "rights": ["list", "open", "import", "delete", "admin"],
   "expires": "2020-01-01T00:00:00Z"})";

// The table of TransportTest (kvstore/service/admission_test.cc) with HTTP as one more transport.
TEST_F(ApiServiceTest, RightsTimesRoutesTimesIdentities_OnlyTheRightOfTheRouteOpensIt) {
  Start(kOnePerRight);
  Bring("mine", "all");
  const std::map<std::string, int> allowed = {
      {"GET /metrics", 200},
      {"GET /v1/models", 200},
      {"GET /v1/models/{}", 200},
      {"POST /v1/completions", 200},
      {"POST /v1/chat/completions", 404},  // the demo model knows no chats
      {"GET /v1/contexts", 200},
      {"POST /v1/contexts", 400},  // of an empty text
      {"GET /v1/contexts/{}", 200},
      {"DELETE /v1/contexts/{}", 404},
      {"GET /v1/contexts/{}/events", 200},
      {"GET /v1/contexts/{}/text", 200},
      {"POST /v1/contexts/{}/warm", 200},
  };
  ASSERT_EQ(allowed.size(), kvstore::HttpRights().size());
  const auto call = [&](const std::string& route, const std::string& key) {
    const size_t space = route.find(' ');
    const std::string method = route.substr(0, space);
    std::string target = route.substr(space + 1);
    const bool model = target == "/v1/models/{}";
    absl::StrReplaceAll({{"{}", model ? "demo" : method == "DELETE" ? "absent" : "mine"}}, &target);
    if (method != "POST") return Ask(method, target, key);
    if (absl::StrContains(target, "chat")) {
      return Post(target, R"({"messages":[{"role":"user","content":"x"}]})", key);
    }
    return target == "/v1/contexts" ? Post(target, "", key, "text/plain")
                                    : Post(target, Question(1), key);
  };
  int64_t lines = 0;
  for (const auto& [route, status] : allowed) {
    const std::string right(kvstore::RightName(*kvstore::RightOf(route)));
    for (const char* key : {"list", "open", "import", "delete", "admin", "all"}) {
      const bool may = right == key || std::string(key) == "all";
      const Response got = call(route, key);
      EXPECT_EQ(got.status, may ? status : 403) << route << " with " << key << ": " << got.body;
      lines += !may;
    }
    for (const char* key : {"wrong", "old", ""}) {
      const Response got = call(route, key);
      EXPECT_EQ(got.status, 401) << route << " with " << key << ": " << got.body;
      EXPECT_THAT(got.headers, HasSubstr("WWW-Authenticate: Bearer"));
      ++lines;
    }
  }
  for (const char* open : {"/", "/health", "/healthz", "/ready"}) {
    EXPECT_EQ(Ask("GET", open).status, 200);
  }
  int64_t denied = 0;
  for (const json& line : AuditLines()) denied += line["event"] == "denied";
  EXPECT_EQ(denied, lines);
}

TEST_F(ApiServiceTest, WithoutKeys_AnybodyAsks_TheTokenAndTheSocketsOwnerDoAll) {
  Start(nullptr);
  Bring("mine", "token");
  for (const char* key : {"", "sk-anything", "not-needed"}) {  // as OpenAI's clients present one
    EXPECT_EQ(Ask("GET", "/v1/models", key).status, 200);
    EXPECT_EQ(Post("/v1/completions", Question(2), key).status, 200);
    EXPECT_EQ(Ask("GET", "/v1/contexts/mine/text", key).status, 200);
    const Response deleted = Ask("DELETE", "/v1/contexts/mine", key);
    EXPECT_EQ(deleted.status, 403);
    EXPECT_THAT(deleted.body, HasSubstr("token"));
    EXPECT_EQ(Post("/v1/contexts?name=x", "text", key, "text/plain").status, 403);
    EXPECT_EQ(json::parse(Ask("GET", "/v1/models", key).body)["carrel"]["rights"],
              json({"list", "open"}));
  }
  const json may = json::parse(Ask("GET", "/v1/models", "token").body)["carrel"];
  EXPECT_EQ(may["rights"], json({"list", "open", "import", "delete"}));
  EXPECT_TRUE(may["key"].is_null() && may["takes_documents"] == true) << may;
  UnixClient owner(socket_);
  owner.Send("DELETE /v1/contexts/mine HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_THAT(owner.ReadAll(), HasSubstr("200 OK"));
  EXPECT_EQ(Ask("GET", "/v1/contexts/mine").status, 404);
}

TEST_F(ApiServiceTest, WhatIsNotSeen_IsAsWhatIsNotThere) {
  Start(R"({"name": "root", "sha256": "%all%", "rights": ["list", "open", "import", "delete"]},
           {"name": "a", "sha256": "%a%", "rights": ["list", "open", "import", "delete"],
            "contexts": "a-*"})");
  Bring("mine", "all");
  const auto words = [](const Response& response, const std::string& name) {
    return absl::StrCat(response.status, " ", absl::StrReplaceAll(response.body, {{name, "NAME"}}));
  };
  for (const char* what : {"", "/text", "/events"}) {
    EXPECT_EQ(words(Ask("GET", absl::StrCat("/v1/contexts/mine", what), "a"), "mine"),
              words(Ask("GET", absl::StrCat("/v1/contexts/none", what), "a"), "none"));
  }
  EXPECT_EQ(words(Ask("DELETE", "/v1/contexts/mine", "a"), "mine"),
            words(Ask("DELETE", "/v1/contexts/none", "a"), "none"));
  EXPECT_EQ(words(Post("/v1/completions", Question(1), "a"), "mine"),
            words(Post("/v1/completions", Question(1, false, "none"), "a"), "none"));
  EXPECT_EQ(Post("/v1/contexts?name=b-1", kText, "a", "text/plain").status, 403);
  EXPECT_THAT(Ask("GET", "/v1/models", "a").body, testing::Not(HasSubstr("mine")));
  EXPECT_EQ(Ask("GET", "/v1/contexts/mine", "all").status, 200);
}

// Streams, answers that wait behind them, and documents' events: each ends within two seconds.
TEST_F(ApiServiceTest, AKeyThatIsWithdrawn_EndsWhatRunsWaitsOrStreams) {
  constexpr char kRoot[] =
      R"({"name": "root", "sha256": "%all%", "rights": ["list", "open", "import", "delete"]})";
  Start(absl::StrCat(kRoot, R"(, {"name": "a", "sha256": "%a%", "rights": ["list", "open"]})")
            .c_str(),
        "", [](ApiConfig& config) { config.engine.scheduler.max_answers = 2; });
  Bring("mine", "all");
  std::string much;
  for (int i = 0; i < 400; ++i) absl::StrAppend(&much, "Line ", i, " of a long text. ");
  ASSERT_EQ(Post("/v1/contexts?name=long", much, "all", "text/plain").status, 202);
  std::vector<std::unique_ptr<TestClient>> streams;
  for (int i = 0; i < 6; ++i) {  // two run, four wait
    streams.push_back(std::make_unique<TestClient>(address_));
    streams.back()->Post("/v1/completions", Question(1900, i % 2 == 0), Bearer("a"));
  }
  streams.push_back(std::make_unique<TestClient>(address_));
  streams.back()->Ask("GET", "/v1/contexts/long/events", Bearer("a"));
  absl::SleepFor(absl::Milliseconds(300));
  WriteKeys(kRoot);
  const absl::Time withdrawn = absl::Now();
  for (const auto& stream : streams) {
    const Response got = stream->Receive();
    const bool ended_before = absl::StrContains(got.body, "[DONE]") || got.status == 200;
    EXPECT_TRUE(absl::StrContains(got.body, "withdrawn") ||
                absl::StrContains(got.body, "stands for it no more") || ended_before)
        << got.status << got.body.substr(got.body.size() > 300 ? got.body.size() - 300 : 0);
  }
  EXPECT_LT(absl::Now() - withdrawn, absl::Seconds(10));  // a bound of the test, not of the promise
  EXPECT_EQ(Ask("GET", "/v1/models", "a").status, 401);
  int64_t withdrawals = 0;
  for (const json& line : AuditLines())
    withdrawals += line["event"] == "denied" && line["key"] == "a";
  EXPECT_GE(withdrawals, 4);
}

// Who waits for a document's text is looked at as who waits for an answer.
TEST_F(ApiServiceTest, AKeyThatIsWithdrawn_DoesNotHaveTheTextThatItWaitedFor) {
  constexpr char kRoot[] =
      R"({"name": "root", "sha256": "%all%", "rights": ["list", "open", "import", "delete"]})";
  Start(absl::StrCat(kRoot, R"(, {"name": "a", "sha256": "%a%", "rights": ["list", "open"]})")
            .c_str());
  const std::string much =
      *ReadFile(SourceFolder() + "/models/demo/docs/registry-8k.txt");  // takes some seconds
  ASSERT_EQ(Post("/v1/contexts?name=long", absl::StrCat(much, much), "all", "text/plain").status,
            202);
  ASSERT_EQ(Post("/v1/contexts?name=next", kText, "all", "text/plain").status, 202);
  TestClient waits(address_);
  waits.Ask("GET", "/v1/contexts/next/text?wait=600", Bearer("a"));
  absl::SleepFor(absl::Milliseconds(300));
  WriteKeys(kRoot);
  const Response got = waits.Receive();
  EXPECT_EQ(got.status, 403) << got.body;
  EXPECT_THAT(got.body, testing::Not(HasSubstr("badge")));
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/long", "all").status, 200);
}

// One key's many questions do not keep another's one waiting, nor fill all places where questions wait.
TEST_F(ApiServiceTest, ManyQuestionsOfOneKey_LeaveAnotherItsTurn) {
  Start(R"({"name": "root", "sha256": "%all%", "rights": ["list", "open", "import", "delete"]},
           {"name": "a", "sha256": "%a%", "rights": ["list", "open"]},
           {"name": "b", "sha256": "%b%", "rights": ["list", "open"]})",
        "", [](ApiConfig& config) {
          config.engine.scheduler.max_answers = 1;
          config.engine.scheduler.max_waiting = 16;
        });
  Bring("mine", "all");
  const auto waiting = [&] {
    return json::parse(Ask("GET", "/health").body)["waiting"].get<int64_t>();
  };
  std::vector<std::unique_ptr<TestClient>> many;
  for (int i = 0; i < 9; ++i) {  // one runs, eight wait
    many.push_back(std::make_unique<TestClient>(address_));
    many.back()->Post("/v1/completions", Question(1900), Bearer("a"));
    const absl::Time until = absl::Now() + absl::Seconds(20);
    while (waiting() < i && absl::Now() < until) absl::SleepFor(absl::Milliseconds(1));
  }
  const Response full = Post("/v1/completions", Question(1), "a");
  EXPECT_EQ(full.status, 429) << full.body;
  EXPECT_THAT(full.body, HasSubstr("of the same key"));
  EXPECT_EQ(Post("/v1/completions", Question(1), "b").status, 200);
  EXPECT_GE(waiting(), 4);
}

// Where nobody has a key there is nobody to leave room for: as many wait as may.
TEST_F(ApiServiceTest, WithoutKeys_AsManyQuestionsWaitAsMay) {
  Start(nullptr, "", [](ApiConfig& config) {
    config.engine.scheduler.max_answers = 1;
    config.engine.scheduler.max_waiting = 4;
  });
  Bring("mine", "token");
  std::vector<std::unique_ptr<TestClient>> many;
  int64_t waiting = 0;
  for (int i = 0; i < 5; ++i) {  // one runs, four wait
    many.push_back(std::make_unique<TestClient>(address_));
    many.back()->Post("/v1/completions", Question(1900));
    const absl::Time until = absl::Now() + absl::Seconds(20);
    while (waiting < i && absl::Now() < until) {
      waiting = json::parse(Ask("GET", "/health").body)["waiting"].get<int64_t>();
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  EXPECT_EQ(waiting, 4);
  EXPECT_EQ(Post("/v1/completions", Question(1)).status, 429);
}

// Requests are read and tokenized by turns: one key's long ones do not keep another's short one waiting.
TEST_F(ApiServiceTest, ManyLongPromptsOfOneKey_LeaveAnotherItsTurn) {
  Start(R"({"name": "a", "sha256": "%a%", "rights": ["list", "open"]},
           {"name": "b", "sha256": "%b%", "rights": ["list", "open"]})");
  constexpr int kMany = 32;
  std::string words;
  while (words.size() < 1000000) absl::StrAppend(&words, " word", words.size());
  const std::string body = json{{"prompt", words}, {"max_tokens", 1}}.dump();
  std::atomic<int> sent{0}, answered{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < kMany; ++i) {
    clients.emplace_back([&] {
      TestClient client(address_);
      client.Post("/v1/completions", body, Bearer("a"));
      ++sent;
      EXPECT_EQ(client.Receive().status, 400);  // it is too long for the model
      ++answered;
    });
  }
  while (sent < kMany) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(Post("/v1/completions", R"({"prompt": 5})", "b").status, 400);
  EXPECT_LT(answered, kMany / 2);
  for (std::thread& client : clients) client.join();
}

TEST_F(ApiServiceTest, LimitsOfKeys_HoldOverHttp) {
  Start(R"({"name": "root", "sha256": "%all%", "rights": ["list", "open", "import", "delete"]},
           {"name": "a", "sha256": "%a%", "rights": ["list", "open"], "requests_per_second": 1},
           {"name": "b", "sha256": "%b%", "rights": ["list", "open"], "sessions": 1})");
  Bring("mine", "all");
  std::map<int, int> statuses;
  for (int i = 0; i < 20; ++i) {
    const Response got = Ask("GET", "/v1/models", "a");
    ++statuses[got.status];
    if (got.status != 429) continue;
    EXPECT_THAT(got.headers, HasSubstr("Retry-After: "));
  }
  EXPECT_GE(statuses[200], 1);
  EXPECT_GE(statuses[429], 15);
  TestClient running(address_);
  running.Post("/v1/completions", Question(1900, true), Bearer("b"));
  (void)running.ReadUntil("data: ");
  const Response second = Post("/v1/completions", Question(1), "b");
  EXPECT_EQ(second.status, 429) << second.body;
  running.Close();
  const absl::Time until = absl::Now() + absl::Seconds(20);
  int status = 0;
  while (status != 200 && absl::Now() < until) {
    status = Post("/v1/completions", Question(1), "b").status;
  }
  EXPECT_EQ(status, 200);  // it is given back
}

TEST_F(ApiServiceTest, BytesOfBodies_CountAgainstTheKeysRate) {
  Start(R"({"name": "a", "sha256": "%a%", "rights": ["list", "open"], "bytes_per_second": 1000})");
  const std::string body =
      absl::StrCat(R"({"prompt": 5, "user": ")", std::string(100000, 'x'), "\"}");
  EXPECT_EQ(Post("/v1/completions", body, "a").status, 400);
  EXPECT_EQ(Ask("GET", "/v1/models", "a").status, 429);  // for some hundred seconds
}

TEST_F(ApiServiceTest, AQuota_HoldsForDocumentsThatComeAtOnce) {
  Start(R"({"name": "a", "sha256": "%a%", "rights": ["list", "open", "import", "delete"],
            "tenant": "t"})",
        R"({"name": "t", "prefix": "t-", "contexts": 1})");
  std::atomic<int> taken{0}, refused{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < 8; ++i) {
    clients.emplace_back([&, i] {
      const Response got =
          Post(absl::StrCat("/v1/contexts?name=t-", i), absl::StrCat(kText, i), "a", "text/plain");
      ++(got.status == 202 ? taken : refused);
      EXPECT_TRUE(got.status == 202 || got.status == 429 || got.status == 507) << got.body;
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(taken, 1);
  EXPECT_EQ(refused, 7);
}

TEST_F(ApiServiceTest, TheAuditLog_TellsOfAnswersDocumentsAndDeletions) {
  Start(nullptr);
  Bring("mine", "token");
  EXPECT_EQ(Post("/v1/completions", Question(2), "token").status, 200);
  EXPECT_EQ(Post("/v1/completions", R"({"prompt": "Who", "max_tokens": 1})", "").status, 200);
  EXPECT_EQ(Post("/v1/completions", Question(2, false, "none"), "token").status, 404);
  EXPECT_EQ(Ask("GET", "/v1/contexts/mine/text", "").status, 200);
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/mine", "").status, 403);
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/mine", "token").status, 200);
  std::vector<std::string> told;
  for (const json& line : AuditLines()) {
    told.push_back(absl::StrCat(line["event"].get<std::string>(), " ",
                                line["key"].get<std::string>(), " ",
                                line["context"].get<std::string>()));
  }
  EXPECT_THAT(
      told, testing::ElementsAre("import token mine", "open token mine", "close token mine",
                                 "open anyone ", "close anyone ", "open token none",
                                 "tokens anyone mine", "denied anyone mine", "delete token mine"));
}

TEST_F(ApiServiceTest, Targets_Methods_AndBounds) {
  Start(nullptr, "", [](ApiConfig& config) { config.max_document_bytes = 10000; });
  Bring("mine", "token");
  const auto status = [&](const char* method, const std::string& target) {
    return Ask(method, target).status;
  };
  for (const char* target : {"/v1/models?limit=1", "/v1/models/", "//v1/models", "/v1/models/demo",
                             "/v1/models/demo@mine", "/health?x", "/?utm=1", "/v1/contexts/m%69ne",
                             "http://127.0.0.1/v1/models"}) {
    EXPECT_EQ(status("GET", target), 200) << target;
  }
  EXPECT_EQ(Post("/v1/completions/?api-version=2024-06-01", Question(1)).status, 200);
  EXPECT_EQ(status("GET", "/v1/models/none"), 404);
  EXPECT_EQ(status("GET", "/v1/model"), 404);
  EXPECT_EQ(status("OPTIONS", "/v1/models"), 204);
  const Response wrong = Ask("PUT", "/v1/contexts");
  EXPECT_EQ(wrong.status, 405);
  EXPECT_THAT(wrong.headers, HasSubstr("Allow: GET, HEAD, POST, OPTIONS"));
  TestClient head(address_);
  head.Send("HEAD /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
  const std::string whole = head.Read(1 << 20);
  EXPECT_THAT(whole, HasSubstr("200 OK"));
  EXPECT_THAT(whole, testing::EndsWith("\r\n\r\n"));
  EXPECT_EQ(Post("/v1/completions", std::string((1 << 20) + 1, ' ')).status, 413);
  EXPECT_EQ(Post("/v1/contexts", std::string(200000, 'x'), "token", "text/plain").status, 413);
  for (const char* target : {"/v1/completions", "/v1/chat/completions", "/v1/contexts"}) {
    TestClient coded(address_);  // what is not decoded is not taken for something else
    coded.Post(target, R"({"prompt": "x", "max_tokens": 1})",
               absl::StrCat("Content-Encoding: gzip\r\n", Bearer("token")));
    EXPECT_EQ(coded.Receive().status, 415) << target;
  }
  // A stranger's body is not read.
  TestClient stranger(address_);
  stranger.Send("POST /v1/contexts HTTP/1.1\r\nHost: x\r\nContent-Length: 19000\r\n\r\n");
  EXPECT_EQ(stranger.Receive().status, 403);
  for (const char* host : {"evil.example", "127.0.0.1:80@evil.example"}) {
    TestClient other(address_);
    other.Send(absl::StrCat("GET /v1/models HTTP/1.1\r\nHost: ", host, "\r\n\r\n"));
    EXPECT_EQ(other.Receive().status, 403) << host;
  }
  TestClient site(address_);
  site.Send(
      "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: same-origin\r\n"
      "Origin: http://evil\r\n\r\n");
  EXPECT_EQ(site.Receive().status, 403);
}

// --- any JSON

class Trees {
 public:
  explicit Trees(uint64_t seed) : rng_(seed) {}

  std::string Body(bool chat) {
    json body = json::object();
    if (Below(20) == 0) return Shown(Any(0));
    body["max_tokens"] = Below(30) == 0 ? Any(0) : json(1 + Below(3));
    if (Below(10) != 0) body["temperature"] = Below(4) == 0 ? Any(0) : json(0);
    if (chat) {
      body["messages"] = Below(5) == 0 ? Any(0) : Messages();
    } else {
      body["prompt"] = Below(3) == 0 ? Any(0) : json(" Who");
    }
    for (uint64_t n = Below(5); n > 0; --n) body[Name()] = Any(0);
    return Shown(body);
  }
  std::string Document() {
    json body = {{"name", Below(2) ? Any(0) : json("t")}, {"text", Below(2) ? Any(0) : json("")}};
    for (uint64_t n = Below(3); n > 0; --n) body[Name()] = Any(0);
    if (body["text"].is_string()) body["text"] = "";  // none is brought
    return Shown(body);
  }

 private:
  uint64_t Below(uint64_t n) { return rng_() % n; }

  std::string Name() {
    static constexpr const char* kNames[] = {"n",
                                             "best_of",
                                             "stop",
                                             "stream",
                                             "stream_options",
                                             "seed",
                                             "top_p",
                                             "top_k",
                                             "min_p",
                                             "logprobs",
                                             "logit_bias",
                                             "tools",
                                             "tool_choice",
                                             "functions",
                                             "audio",
                                             "modalities",
                                             "echo",
                                             "suffix",
                                             "model",
                                             "context",
                                             "sources",
                                             "wait",
                                             "user",
                                             "metadata",
                                             "store",
                                             "response_format",
                                             "messages",
                                             "prompt",
                                             "temperature",
                                             "max_tokens",
                                             "presence_penalty",
                                             "chat_template_kwargs",
                                             "reasoning_effort",
                                             "type",
                                             "content",
                                             "role",
                                             "text",
                                             "name",
                                             "chat",
                                             "include_usage",
                                             "max_completion_tokens"};
    return kNames[Below(std::size(kNames))];
  }

  json Any(int depth) {
    switch (Below(depth > 3 ? 9 : 12)) {
      case 0:
        return nullptr;
      case 1:
        return Below(2) == 1;
      case 2:
        return static_cast<int64_t>(Below(7)) - 3;
      case 3:
        return rng_();
      case 4:
        return static_cast<double>(static_cast<int64_t>(rng_())) / 1e3;
      case 5:
        return "";
      case 6:
        return std::string(Below(400), 'x');
      case 7:
        return Below(2) ? "user" : "text";
      case 8:
        return std::string("\xff\x00\xc3", 3);  // printed as U+FFFD
      case 9: {
        json list = json::array();
        for (uint64_t n = Below(5); n > 0; --n) list.push_back(Any(depth + 1));
        return list;
      }
      case 10: {
        json nested = Any(depth + 1);
        for (uint64_t n = Below(80); n > 0; --n) nested = json::array({nested});
        return nested;
      }
      default: {
        json object = json::object();
        for (uint64_t n = Below(4); n > 0; --n) object[Name()] = Any(depth + 1);
        return object;
      }
    }
  }

  json Messages() {
    json list = json::array();
    for (uint64_t n = Below(4); n > 0; --n) {
      json message = {{"role", Below(4) ? json("user") : Any(0)},
                      {"content", Below(2) ? json("x") : Any(0)}};
      if (Below(3) == 0) {
        message["content"] = json::array({{{"type", Any(0)}, {"text", Any(0)}}});
      }
      if (Below(4) == 0) message[Name()] = Any(0);
      list.push_back(message);
    }
    return list;
  }

  static std::string Shown(const json& value) {
    return value.dump(-1, ' ', false, json::error_handler_t::replace);
  }

  std::mt19937_64 rng_;
};

// CARREL_TRIALS: of each route; 400 with every build.
TEST_F(ApiServiceTest, AnyJson_IsAnsweredWithAReason_AndTheServerLives) {
  Start(nullptr);
  Bring("mine", "token");
  const char* trials = std::getenv("CARREL_TRIALS");
  const int count = trials == nullptr ? 400 : std::atoi(trials);
  const uint64_t seed = TestSeed();
  std::atomic<int64_t> replies{0};
  const auto hammer = [&](const std::string& target, uint64_t of_this) {
    Trees trees(seed + of_this);
    auto client = std::make_unique<TestClient>(address_);
    for (int i = 0; i < count; ++i) {
      const std::string body = target == "/v1/contexts"
                                   ? trees.Document()
                                   : trees.Body(absl::StrContains(target, "chat"));
      client->Post(target, body,
                   absl::StrCat("Content-Type: application/json\r\n", Bearer("token")));
      const Response got = client->Receive();
      const bool expected = (got.status >= 200 && got.status < 300) ||
                            (got.status >= 400 && got.status < 500) || got.status == 503 ||
                            got.status == 504 || got.status == 507;
      ASSERT_TRUE(expected) << got.status << " " << got.body << "\n" << body.substr(0, 2000);
      if (got.status >= 400) {
        const json error = json::parse(got.body, nullptr, false);
        ASSERT_TRUE(error.is_object() && error["error"]["message"].is_string()) << got.body;
        ASSERT_LT(got.body.size(), 4000u) << got.body;
      }
      ++replies;
      if (absl::StrContains(got.headers, "Connection: close")) {
        client = std::make_unique<TestClient>(address_);
      }
    }
  };
  std::vector<std::thread> threads;
  uint64_t n = 0;
  for (const char* target : {"/v1/completions", "/v1/chat/completions", "/v1/contexts"}) {
    threads.emplace_back([&hammer, target, n = ++n] { hammer(target, n); });
  }
  for (std::thread& thread : threads) thread.join();
  std::cout << "replies: " << replies << std::endl;
  EXPECT_EQ(Post("/v1/completions", Question(2)).status, 200);
}

}  // namespace
}  // namespace carrel::http_api
