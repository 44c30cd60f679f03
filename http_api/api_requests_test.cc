// What real clients send to carrel api, and what becomes of it: a table of requests, documents that are on their
// way, whose documents are whose. In this process, with the demo model and a chat template of its own.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "common/file.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "http_api/api_service.h"
#include "http_api/http_test_util.h"
#include "kvstore/access/access.h"
#include "kvstore/access/kept_name.h"

namespace carrel::http_api {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;
using Response = TestClient::Response;

constexpr char kText[] = "The badge number of Ada is 4711. The badge number of Ben is 1234.\n";
// Of each role what it says, and nothing of others; one field of the request.
constexpr char kTemplate[] =
    "{% for m in messages %}{% if m.role == 'system' %}S: {{ m.content }}\n{% elif m.role == "
    "'user' %}U: {{ "
    "m.content }}\n{% elif m.role == 'assistant' %}A: {{ m.content }}\n{% endif %}{% endfor %}{% "
    "if "
    "add_generation_prompt %}A:{% endif %}{% if enable_thinking is defined %} think{% endif %}";

class ApiRequestsTest : public testing::Test {
 protected:
  void SetUp() override {
    fs::copy(SourceFolder() + "/models/demo", model_folder_, fs::copy_options::recursive);
    const std::string path = model_folder_ + "/tokenizer_config.json";
    json config = json::parse(*ReadFile(path));
    config["chat_template"] = kTemplate;
    std::ofstream(path) << config.dump();
  }

  void Start(const std::function<void(ApiConfig&)>& change = nullptr) {
    service_ = nullptr;
    store_ = nullptr;
    model_ = *library::LoadedModel::Load(model_folder_, "", /*threads=*/2);
    ApiConfig config;
    config.model_name = "demo";
    config.http.listen = {"127.0.0.1:0"};
    config.access = kvstore::Access::OpenWithToken("token");
    config.engine.scheduler.decoders.folder = config.engine.documents->address.folder =
        folder_ + "/store";
    config.engine.documents->writable = true;
    config.engine.scheduler.decoders.config.want = decoder::RetrievalConfig().want;
    if (change) change(config);
    library::StoreAddress address;
    address.folder = folder_ + "/store";
    auto store = library::StoreAccess::Open(address, kvstore::StoreMode::kReadWrite);
    CARREL_ASSERT_OK(store.status());
    store_ = *std::move(store);
    auto service = ApiService::Start(config, model_, store_);
    CARREL_ASSERT_OK(service.status());
    service_ = *std::move(service);
    address_ = service_->addresses()[0];
  }
  using Keys = std::vector<std::pair<std::string, std::string>>;
  // Keys of these names, with these globs, that may do all.
  void WriteKeys(const Keys& keys) {
    json entries = json::array();
    for (const auto& [name, glob] : keys) {
      entries.push_back({{"name", name},
                         {"sha256", absl::BytesToHexString(kvstore::AccessKeySha256(name))},
                         {"rights", {"list", "open", "import", "delete"}},
                         {"contexts", {glob}}});
    }
    CARREL_ASSERT_OK(WritePrivateFile(keys_file_, json{{"keys", entries}}.dump()));
  }
  void StartWithKeys(const Keys& keys, int64_t keep) {
    WriteKeys(keys);
    auto access = kvstore::Access::Create(keys_file_, absl::Milliseconds(50));
    CARREL_ASSERT_OK(access.status());
    Start([&](ApiConfig& config) {
      config.access = *access;
      config.engine.documents->keep = keep;
      config.engine.documents->keep_tokens = 100;
    });
  }
  ~ApiRequestsTest() override { service_ = nullptr; }

  Response Ask(const std::string& method, const std::string& target,
               const std::string& key = "token") {
    TestClient client(address_);
    client.Ask(method, target, absl::StrCat("Authorization: Bearer ", key, "\r\n"));
    return client.Receive();
  }
  Response Post(const std::string& target, const std::string& body,
                const std::string& key = "token", const std::string& type = "application/json") {
    TestClient client(address_);
    client.Post(target, body,
                absl::StrCat("Content-Type: ", type, "\r\nAuthorization: Bearer ", key, "\r\n"));
    return client.Receive();
  }
  json Of(const Response& response) {
    EXPECT_TRUE(json::accept(response.body)) << response.body;
    return json::parse(response.body, nullptr, false);
  }
  bool BecomesReady(const std::string& name, const std::string& key = "token") {
    const absl::Time until = absl::Now() + absl::Seconds(120);
    while (absl::Now() < until) {
      const std::string state = Of(Ask("GET", "/v1/contexts/" + name, key)).value("state", "");
      if (state == "ready" || state == "failed") return state == "ready";
      absl::SleepFor(absl::Milliseconds(5));
    }
    return false;
  }
  void Bring(const std::string& name, const std::string& text = kText,
             const std::string& key = "token") {
    const Response added = Post("/v1/contexts?name=" + name, text, key, "text/plain");
    ASSERT_EQ(added.status, 202) << added.body;
    ASSERT_TRUE(BecomesReady(name, key));
  }
  std::vector<std::string> Names(const std::string& key = "token") {
    std::vector<std::string> names;
    const json listed = Of(Ask("GET", "/v1/contexts", key));
    for (const json& context : listed["data"]) names.push_back(context["name"]);
    return names;
  }
  // Takes some seconds to be read on a busy machine.
  static std::string LongText() {
    return *ReadFile(SourceFolder() + "/models/demo/docs/registry-8k.txt");
  }

  const std::string folder_ = FreshTempDir(), model_folder_ = folder_ + "/model";
  const std::string keys_file_ = folder_ + "/keys.json";
  std::shared_ptr<library::LoadedModel> model_;
  std::shared_ptr<library::StoreAccess> store_;
  std::unique_ptr<ApiService> service_;
  std::string address_;
};

struct Case {
  const char* name;
  bool chat;
  const char* fields;  // beside prompt or messages, context and max_tokens, which they replace
  int status;
  const char* words;  // of the body
};

const Case kCases[] = {
    {"plain", true, R"({})", 200, "choices"},
    {"developer", true,
     R"({"messages": [{"role": "developer", "content": "Briefly."}, {"role": "user", "content": "Who?"}]})",
     200, "choices"},
    {"User", true, R"({"messages": [{"role": "User", "content": "Who?"}]})", 400,
     "in small letters"},
    {"function", true,
     R"({"messages": [{"role": "user", "content": "Who?"}, {"role": "function", "content": "x"}]})",
     400, "messages[1]"},
    {"empty role", true, R"({"messages": [{"role": "", "content": "x"}]})", 400,
     "messages[0].role"},
    {"null content", true,
     R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}, {"role": "user", "content": "b"}]})",
     200, "choices"},
    {"tool_calls []", true,
     R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x", "tool_calls": []}, {"role": "user", "content": "b"}]})",
     200, "choices"},
    {"part without type", true,
     R"({"messages": [{"role": "user", "content": [{"type": null, "text": "x"}]}]})", 200,
     "choices"},
    {"part of a number", true,
     R"({"messages": [{"role": "user", "content": [{"type": 1, "text": "x"}]}]})", 400,
     "messages[0].content[0].type"},
    {"image", true, R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})", 400,
     "image_url"},
    {"response_format null type", true, R"({"response_format": {"type": null}})", 400,
     "response_format"},
    {"response_format text", true, R"({"response_format": {"type": "text"}})", 200, "choices"},
    {"n 1.0", true, R"({"n": 1.0})", 200, "choices"},
    {"n 2", true, R"({"n": 2})", 400, "\"param\":\"n\""},
    {"tools auto", true, R"({"tools": [], "tool_choice": "auto", "parallel_tool_calls": true})",
     200, "choices"},
    {"tools", true, R"({"tools": [{"type": "function"}]})", 400, "tools are not supported"},
    {"max_tokens 2.0", true, R"({"max_tokens": 2.0})", 200, "choices"},
    {"max_tokens text", true, R"({"max_tokens": "8"})", 400, "\"param\":\"max_tokens\""},
    {"seed 1.0", true, R"({"seed": 1.0})", 200, "choices"},
    {"thinking known", true, R"({"chat_template_kwargs": {"enable_thinking": false}})", 200,
     "choices"},
    {"template kwarg unknown", true, R"({"chat_template_kwargs": {"tone": 1}})", 200,
     "\"ignored\":[\"chat_template_kwargs.tone\"]"},
    {"reasoning_effort", true, R"({"reasoning_effort": "low"})", 200,
     "\"ignored\":[\"reasoning_effort\"]"},
    {"kwargs messages", true, R"({"chat_template_kwargs": {"messages": []}})", 400,
     "chat_template_kwargs.messages"},
    {"continue", true,
     R"({"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada"}], "continue_final_message": true})",
     200, "choices"},
    {"sampling", true,
     R"({"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1, "temperature": 0.5})", 200,
     "\"repetition_penalty\":1.1"},
    {"unknown", true, R"({"watermark": true, "user": "me"})", 200, "\"ignored\":[\"watermark\"]"},
    {"guided", true, R"({"guided_regex": "a"})", 400, "guided_regex"},
    {"context_name", true, R"({"context_name": "doc"})", 400, "did you mean context?"},
    {"maxTokens", true, R"({"maxTokens": 5})", 400, "did you mean max_tokens?"},
    {"model@context", true, R"({"context": null, "model": "demo@doc"})", 200,
     "\"context\":\"doc\""},
    {"@context", true, R"({"context": null, "model": "@doc"})", 200, "\"context\":\"doc\""},
    {"two contexts", true, R"({"model": "demo@other"})", 400, "\"param\":\"context\""},
    {"no such model", true, R"({"model": "gpt-4o"})", 404, "\"param\":\"model\""},
    {"no such context", true, R"({"context": "none"})", 404, "\"param\":\"context\""},
    {"no name", true, R"({"context": "a b"})", 400, "\"param\":\"context\""},
    {"suffix", false, R"({"suffix": "", "echo": false, "best_of": 1, "logit_bias": {}})", 200,
     "choices"},
    {"list of one", false, R"({"prompt": ["Who?"]})", 200, "choices"},
    {"token ids", false, R"({"prompt": [1, 2, 3]})", 400, "token ids"},
    {"logprobs 0", false, R"({"logprobs": 0})", 400, "logprobs"},
    {"stop empty", false, R"({"stop": ""})", 200, "choices"},
    {"stop null", false, R"({"stop": [null]})", 400, "stop"},
    {"stream text", false, R"({"stream": "true"})", 400, "\"param\":\"stream\""},
    {"wait", false, R"({"wait": 5})", 200, "choices"},
};

TEST_F(ApiRequestsTest, ATableOfRequests_IsAnswered) {
  Start();
  Bring("doc");
  for (const Case& c : kCases) {
    json body = {{"context", "doc"}, {"max_tokens", 2}, {"temperature", 0}};
    if (c.chat) {
      body["messages"] = {{{"role", "user"}, {"content", "Who?"}}};
    } else {
      body["prompt"] = " Who?";
    }
    body.update(json::parse(c.fields));
    const Response got = Post(c.chat ? "/v1/chat/completions" : "/v1/completions", body.dump());
    EXPECT_EQ(got.status, c.status) << c.name << ": " << got.body;
    EXPECT_THAT(got.body, HasSubstr(c.words)) << c.name;
    if (got.status == 200) continue;
    const json error = Of(got)["error"];
    EXPECT_TRUE(error["message"].is_string() && error["type"].is_string()) << c.name;
    EXPECT_LT(error["message"].get<std::string>().size(), 1000u) << c.name;
  }
}

TEST_F(ApiRequestsTest, APromptThatIsTooLong_SaysSoToProgramsAndPeople) {
  Start();
  Bring("doc");
  const int64_t most = model_->checkpoint().config.max_position_embeddings;
  std::string words;
  for (int64_t i = 0; i < most; ++i) words += " badge";
  for (const json& context : {json(), json("doc")}) {
    const Response got = Post(
        "/v1/completions", json{{"context", context}, {"prompt", words}, {"max_tokens", 1}}.dump());
    ASSERT_EQ(got.status, 400) << got.body.substr(0, 300);
    const json error = Of(got)["error"];
    EXPECT_EQ(error["code"], "context_length_exceeded");
    EXPECT_EQ(error["param"], "prompt");
    EXPECT_THAT(error["message"].get<std::string>(), HasSubstr(absl::StrCat("model's ", most)));
    EXPECT_THAT(error["message"].get<std::string>(), testing::Not(HasSubstr("--")));
  }
  const Response document = Post("/v1/contexts?name=long", words, "token", "text/plain");
  EXPECT_EQ(document.status, 400);
  EXPECT_EQ(Of(document)["error"]["code"], "context_length_exceeded");
}

TEST_F(ApiRequestsTest, ADocumentThatIsBeingRead_IsWaitedFor_OrSaysHowFarItIs) {
  Start();
  ASSERT_EQ(Post("/v1/contexts?name=long", LongText(), "token", "text/plain").status, 202);
  ASSERT_EQ(Post("/v1/contexts?name=next", kText, "token", "text/plain").status, 202);
  const auto question = [](const std::string& context, double wait, bool stream = false) {
    return json{{"context", context}, {"prompt", " Who?"}, {"max_tokens", 2},
                {"wait", wait},       {"stream", stream},  {"temperature", 0}}
        .dump();
  };
  for (const char* name : {"long", "next"}) {
    const Response now = Post("/v1/completions", question(name, 0));
    ASSERT_EQ(now.status, 503) << now.body;
    EXPECT_THAT(now.headers, HasSubstr("Retry-After: "));
    EXPECT_EQ(Of(now)["error"]["code"], "context_not_ready");
    EXPECT_THAT(now.body, HasSubstr("come again"));
    EXPECT_EQ(Ask("GET", absl::StrCat("/v1/contexts/", name, "/text")).status, 503);
  }
  // Not for longer than it says, also for one that waits behind another.
  EXPECT_EQ(Post("/v1/completions", question("next", 0.05)).status, 503);
  EXPECT_EQ(Ask("GET", "/v1/contexts/next/text?wait=x").status, 400);
  std::thread streams([&] {
    const Response streamed = Post("/v1/completions", question("next", 600, /*stream=*/true));
    EXPECT_THAT(streamed.body, HasSubstr("[DONE]"));
  });
  std::thread reads([&] {
    const Response text = Ask("GET", "/v1/contexts/next/text?wait=600");
    EXPECT_EQ(text.status, 200);
    EXPECT_EQ(text.body, kText);
  });
  const Response waited = Post("/v1/completions", question("long", 600));
  EXPECT_EQ(waited.status, 200) << waited.body;
  EXPECT_EQ(Of(waited)["carrel"]["context"], "long");
  streams.join();
  reads.join();
  EXPECT_EQ(Post("/v1/completions", question("next", 0)).status, 200);
}

TEST_F(ApiRequestsTest, AText_HasOneName) {
  Start();
  Bring("alpha");
  const auto post = [&](const std::string& name, const std::string& text) {
    return Post("/v1/contexts?name=" + name, text, "token", "text/plain");
  };
  EXPECT_EQ(post("alpha", kText).status, 200);
  EXPECT_EQ(Of(post("", kText))["name"], "alpha");
  const Response second = post("beta", kText);
  EXPECT_EQ(second.status, 409);
  EXPECT_EQ(Of(second)["error"]["code"], "context_exists");
  EXPECT_THAT(second.body, HasSubstr("\\\"alpha\\\""));
  EXPECT_EQ(post("alpha", "Another text.").status, 409);
  EXPECT_EQ(Names(), std::vector<std::string>{"alpha"});
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/alpha").status, 200);
  EXPECT_EQ(post("beta", kText).status, 202);
  EXPECT_TRUE(BecomesReady("beta"));
}

TEST_F(ApiRequestsTest, WhatIsKept_IsItsKeepers) {
  const std::string text = *ReadFile(SourceFolder() + "/models/demo/docs/registry-512.txt"),
                    other = *ReadFile(SourceFolder() + "/models/demo/docs/registry-2k.txt");
  const auto ask = [&](const std::string& key, const std::string& document) {
    const Response got = Post(
        "/v1/completions",
        json{{"prompt", document + "\n\nWho?"}, {"max_tokens", 2}, {"temperature", 0}}.dump(), key);
    EXPECT_EQ(got.status, 200) << got.body;
    return Of(got);
  };
  const auto cached = [](const json& answer) {
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"].get<int64_t>();
  };
  const Keys keys = {{"alice", "*"}, {"bob", "*"}, {"narrow", "narrow-*"}};
  StartWithKeys(keys, /*keep=*/1);
  const json kept = ask("alice", text);
  const std::string name = kept["carrel"]["context"];
  EXPECT_TRUE(kvstore::IsKept(name)) << kept;
  EXPECT_FALSE(kvstore::KeptByAnother(name, "alice"));
  EXPECT_EQ(Names("alice"), std::vector<std::string>{name});
  const auto expect_hidden = [&](const std::string& key) {
    EXPECT_TRUE(Names(key).empty()) << key;
    for (const char* part : {"", "/text", "/events"}) {
      EXPECT_EQ(Ask("GET", absl::StrCat("/v1/contexts/", name, part), key).status, 404)
          << key << part;
    }
    EXPECT_EQ(Ask("DELETE", "/v1/contexts/" + name, key).status, 404);
    const Response open = Post(
        "/v1/completions", json{{"prompt", "x"}, {"context", name}, {"max_tokens", 1}}.dump(), key);
    EXPECT_EQ(open.status, 404);
    EXPECT_THAT(Ask("GET", "/v1/models", key).body, testing::Not(HasSubstr(name)));
  };
  expect_hidden("bob");
  expect_hidden("narrow");
  // One that would not see it has none kept, and is told why.
  const json refused = ask("narrow", text);
  EXPECT_EQ(refused["carrel"]["kept"], false);
  EXPECT_THAT(refused["carrel"]["not_kept"].get<std::string>(), HasSubstr("would not see"));
  EXPECT_EQ(cached(refused), 0);
  EXPECT_EQ(Names("alice").size() + Names("narrow").size() + Names("bob").size(), 1u);
  // Bob's own of another text evicts nothing of Alice's; after a restart, too, each has his own.
  const std::string bobs = ask("bob", other)["carrel"]["context"];
  StartWithKeys(keys, /*keep=*/1);
  EXPECT_EQ(Names("alice"), std::vector<std::string>{name});
  EXPECT_EQ(Names("bob"), std::vector<std::string>{bobs});
  EXPECT_GT(cached(ask("alice", text)), 100);
  // Alice's next one takes the place of her first.
  const std::string next = ask("alice", other)["carrel"]["context"];
  EXPECT_EQ(Names("alice"), std::vector<std::string>{next});
  EXPECT_EQ(Names("bob"), std::vector<std::string>{bobs});
}

// Waiting, half read, or left by another process: with its key a document goes.
TEST_F(ApiRequestsTest, AKeyThatIsWithdrawn_TakesItsDocumentsAlong) {
  const Keys all = {{"alice", "*"}, {"root", "*"}}, root = {{"root", "*"}};
  const auto post = [&](const std::string& name, const std::string& text, const std::string& key) {
    EXPECT_EQ(Post("/v1/contexts?name=" + name, text, key, "text/plain").status, 202) << name;
  };
  const auto nothing_left = [&](const std::string& name) {
    const std::string store = folder_ + "/store/";
    return !fs::exists(store + "waiting/" + name + ".document") &&
           !fs::exists(store + "prefill/" + name);
  };
  StartWithKeys(all, /*keep=*/0);
  post("read", LongText(), "alice");
  post("waits", "Two. " + LongText(), "alice");
  post("others", kText, "root");
  WriteKeys(root);
  EXPECT_TRUE(BecomesReady("others", "root"));  // which waited behind both
  EXPECT_EQ(Names("root"), std::vector<std::string>{"others"});
  EXPECT_TRUE(nothing_left("read") && nothing_left("waits"));
  StartWithKeys(all, /*keep=*/0);
  post("read", LongText(), "alice");
  post("waits", "Two. " + LongText(), "alice");
  service_ = nullptr;
  StartWithKeys(root, /*keep=*/0);
  EXPECT_EQ(Names("root"), std::vector<std::string>{"others"});
  EXPECT_TRUE(nothing_left("read") && nothing_left("waits"));
}

// A link on another page, or in a mail, opens the page; nothing else comes from elsewhere.
TEST_F(ApiRequestsTest, ALinkFromElsewhere_OpensThePageAlone) {
  Start();
  const auto status = [&](const std::string& line, const std::string& mode, const std::string& dest,
                          const std::string& more = "", const std::string& site = "cross-site") {
    TestClient client(address_);
    client.Send(absl::StrCat(line, " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n",
                             "Sec-Fetch-Site: ", site, "\r\nSec-Fetch-Mode: ", mode,
                             "\r\nSec-Fetch-Dest: ", dest, "\r\n", more, "\r\n"));
    return client.Receive().status;
  };
  for (const char* site : {"cross-site", "same-site"}) {
    EXPECT_EQ(status("GET /", "navigate", "document", "", site), 200) << site;
  }
  EXPECT_EQ(status("GET /?utm_source=mail", "navigate", "document"), 200);
  for (const char* target :
       {"/health", "/v1/models", "/v1/contexts", "/metrics", "/v1/contexts/x/text"}) {
    EXPECT_EQ(status(absl::StrCat("GET ", target), "navigate", "document"), 403) << target;
  }
  for (const char* line : {"POST /", "HEAD /", "DELETE /", "OPTIONS /", "POST /v1/contexts"}) {
    EXPECT_EQ(status(line, "navigate", "document", "Content-Length: 0\r\n"), 403) << line;
  }
  for (const char* dest : {"iframe", "frame", "object", "embed", "empty", "script", "image", ""}) {
    EXPECT_EQ(status("GET /", "navigate", dest), 403) << dest;
  }
  for (const char* mode : {"cors", "no-cors", "websocket", ""}) {
    EXPECT_EQ(status("GET /", mode, "document"), 403) << mode;
  }
  EXPECT_EQ(status("GET /", "navigate", "document", "Origin: http://evil.example\r\n"), 403);
}

// What is kept unasked counts in its tenant's quota.
TEST_F(ApiRequestsTest, WhatIsKept_TakesAPlaceInTheQuota) {
  const std::string docs = SourceFolder() + "/models/demo/docs/", file = folder_ + "/keys.json";
  const json key = {{"name", "alice"},
                    {"sha256", absl::BytesToHexString(kvstore::AccessKeySha256("alice"))},
                    {"rights", {"list", "open", "import", "delete"}},
                    {"tenant", "t"}},
             tenant = {{"name", "t"}, {"prefix", "t-"}, {"contexts", 1}};
  const json keys = {{"keys", json::array({key})}, {"tenants", json::array({tenant})}};
  CARREL_ASSERT_OK(WritePrivateFile(file, keys.dump()));
  auto access = kvstore::Access::Create(file, absl::Milliseconds(50));
  CARREL_ASSERT_OK(access.status());
  Start([&](ApiConfig& config) {
    config.access = *access;
    config.engine.documents->keep = 5;
    config.engine.documents->keep_tokens = 100;
  });
  const auto ask = [&](const std::string& document) {
    const Response got = Post("/v1/completions",
                              json{{"prompt", *ReadFile(docs + document) + "\n\nWho?"},
                                   {"max_tokens", 1},
                                   {"temperature", 0}}
                                  .dump(),
                              "alice");
    EXPECT_EQ(got.status, 200) << got.body;
    return Of(got)["carrel"];
  };
  const json kept = ask("registry-512.txt");
  EXPECT_EQ(kept["context"].get<std::string>().substr(0, 7), "t-kept-") << kept;
  const json refused = ask("registry-2k.txt");
  EXPECT_EQ(refused["kept"], false) << refused;
  EXPECT_THAT(refused["not_kept"].get<std::string>(), HasSubstr("contexts=1"));
  EXPECT_EQ(Names("alice").size(), 1u);
}

TEST_F(ApiRequestsTest, WhatFailed_IsListedUntilItIsDeleted_AndNothingElseIsLeft) {
  Start();
  Bring("doc");
  service_ = nullptr;
  const std::string store = folder_ + "/store", kept = "kept-0123456789ab";
  fs::create_directories(store + "/waiting");
  std::ofstream(store + "/waiting/full.failed")
      << json{{"code", 8}, {"message", "disk full: no room"}, {"disk_full", true}}.dump();
  for (const std::string& name : {std::string("half"), kept, std::string("full")}) {
    fs::create_directories(store + "/prefill/" + name);
    std::ofstream(store + "/prefill/" + name + "/layer-0000") << "rows";
  }
  for (int start = 0; start < 2; ++start) {
    Start();
    EXPECT_EQ(Names(), (std::vector<std::string>{"doc", "full", "half"}));
    EXPECT_FALSE(fs::exists(store + "/prefill/" + kept));
    EXPECT_FALSE(fs::exists(store + "/prefill/full"));
    EXPECT_TRUE(fs::exists(store + "/prefill/half"));  // somebody may go on with it
    const json full = Of(Ask("GET", "/v1/contexts/full"));
    EXPECT_EQ(full["state"], "failed");
    EXPECT_EQ(full["error"]["type"], "server_error");
    EXPECT_THAT(full["error"]["message"].get<std::string>(), HasSubstr("no room"));
    EXPECT_EQ(Post("/v1/completions", R"({"prompt": "x", "context": "full"})").status, 409);
  }
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/full").status, 200);
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/half").status, 200);
  EXPECT_FALSE(fs::exists(store + "/prefill/half"));
  EXPECT_FALSE(fs::exists(store + "/waiting/full.failed"));
  Start();
  EXPECT_EQ(Names(), std::vector<std::string>{"doc"});
}

TEST_F(ApiRequestsTest, AByteWithoutAToken_IsRefusedWithItsOffset_OrLeftOutAsIsSaid) {
  const std::string path = model_folder_ + "/tokenizer.json";
  json tokenizer = json::parse(*ReadFile(path));
  ASSERT_EQ(tokenizer["model"]["vocab"].erase("\u00f1"), 1u);  // spells 0xf1: no merge holds it
  std::ofstream(path) << tokenizer.dump();
  Start();
  const std::string text = "The registry \xf1\x80\x80\x80 is open.";
  const Response refused = Post("/v1/contexts?name=a", text, "token", "text/plain");
  EXPECT_EQ(refused.status, 400);
  EXPECT_THAT(refused.body, HasSubstr("byte 0xf1"));
  EXPECT_THAT(refused.body, HasSubstr("offset 13"));
  const Response dropped =
      Post("/v1/contexts?name=a&missing_bytes=drop", text, "token", "text/plain");
  EXPECT_EQ(dropped.status, 202) << dropped.body;
  EXPECT_EQ(Of(dropped)["dropped"],
            (json{{"bytes", 1}, {"first_offset", 13}, {"first_byte", 0xf1}}));
  // As carrel api --missing-bytes drop has it.
  Start([&](ApiConfig&) { model_->DropMissingBytes(); });
  EXPECT_EQ(Post("/v1/contexts?name=b", "A" + text, "token", "text/plain").status, 202);
  EXPECT_TRUE(BecomesReady("b"));
}

TEST_F(ApiRequestsTest, AContextOfAnotherModel_HasNoTextHere) {
  Start();
  Bring("doc");
  EXPECT_EQ(Ask("GET", "/v1/contexts/doc/text").body, kText);
  service_ = nullptr;
  store_ = nullptr;
  // One byte of the weights: whoever made the context was another.
  const std::string weights = model_folder_ + "/model.safetensors";
  std::string bytes = *ReadFile(weights);
  bytes[bytes.size() - 100] ^= 1;
  std::ofstream(weights, std::ios::binary) << bytes;
  Start();
  EXPECT_EQ(Of(Ask("GET", "/v1/contexts/doc"))["usable"], false);
  const Response text = Ask("GET", "/v1/contexts/doc/text");
  EXPECT_EQ(text.status, 409) << text.body;
  EXPECT_THAT(text.body, HasSubstr("another model"));
}

TEST_F(ApiRequestsTest, WithoutATemplateThatRenders_AllButChatsIsServed) {
  const std::string path = model_folder_ + "/tokenizer_config.json";
  json config = json::parse(*ReadFile(path));
  const json no_name = json::array({json{{"name", 5}}}),
             no_text = json::array({json{{"name", "default"}, {"template", 5}}});
  for (const json& bad : {json("{% if %}"), json(5), no_name, no_text}) {
    config["chat_template"] = bad;
    std::ofstream(path) << config.dump();
    Start();
    EXPECT_EQ(Post("/v1/completions", R"({"prompt": "x", "max_tokens": 1})").status, 200) << bad;
    const Response chat =
        Post("/v1/chat/completions",
             R"({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})");
    EXPECT_GE(chat.status, 400) << bad;
    EXPECT_THAT(chat.body, HasSubstr("template")) << bad;
  }
}

}  // namespace
}  // namespace carrel::http_api
