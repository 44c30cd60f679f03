// carrel api as its clients see it: OpenAI's API over a context, with the demo model and a template of its own.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "http_api/http_test_util.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

using http_api::TestClient;
using nlohmann::json;
using testing::HasSubstr;

// A chat is its last message alone: the demo model knows questions, not chats.
constexpr char kTemplate[] =
    "{% if messages[0].role == 'nobody' %}{{ raise_exception('nobody asks') }}{% endif %}{{ "
    "messages[-1].content }}";

class ApiTest : public StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    ASSERT_EQ(answer_.back(), '\n');  // the program's own
    answer_.pop_back();
    model_ = std::make_unique<ModelCopy>(path("model"));
    model_->EditJson("tokenizer_config.json",
                     [](nlohmann::ordered_json& config) { config["chat_template"] = kTemplate; });
  }

  void Start(const Args& more = {}) {
    Command command;
    command.args = With({"api", "--model", model_->folder(), "--store", store_, "--listen",
                         "127.0.0.1:0", "--model-name", "demo", "--top-k", "all"},
                        more);
    process_ = Process::Start(command);
    ASSERT_TRUE(WaitUntil([&] {
      return process_->err().find("/v1\n") != std::string::npos || !process_->Running();
    }));
    const std::string said = process_->err(), before = "http://";
    const size_t at = said.find(before);
    ASSERT_NE(at, std::string::npos) << said;
    address_ = said.substr(at + before.size(), said.find("/v1", at) - at - before.size());
  }

  TestClient::Response Post(const std::string& target, const json& body,
                            const std::string& headers = "") {
    TestClient client(address_);
    client.Post(target, body.dump(), headers);
    return client.Receive();
  }

  json Completion(const json& more = {}) {
    json body = {
        {"model", "demo@kept"}, {"prompt", kQuestion}, {"temperature", 0}, {"max_tokens", 64}};
    if (!more.is_null()) body.update(more);
    return body;
  }

  std::unique_ptr<ModelCopy> model_;
  std::unique_ptr<Process> process_;
  std::string address_;
};

TEST_F(ApiTest, Completions_SayWhatAskSays_WholeAndStreamed) {
  Start();
  const TestClient::Response whole = Post("/v1/completions", Completion());
  ASSERT_EQ(whole.status, 200) << whole.body;
  const json answer = json::parse(whole.body);
  EXPECT_EQ(answer["choices"][0]["text"], answer_);
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(answer["usage"]["prompt_tokens_details"]["cached_tokens"], kept_tokens_);
  EXPECT_GT(answer["usage"]["completion_tokens"], 0);

  const json messages = json::array({{{"role", "user"}, {"content", kQuestion}}});
  const TestClient::Response chat =
      Post("/v1/chat/completions",
           {{"model", "demo"}, {"context", "kept"}, {"messages", messages}, {"temperature", 0}});
  ASSERT_EQ(chat.status, 200) << chat.body;
  EXPECT_EQ(json::parse(chat.body)["choices"][0]["message"]["content"], answer_);

  const TestClient::Response streamed =
      Post("/v1/chat/completions", {{"model", "demo@kept"},
                                    {"messages", messages},
                                    {"temperature", 0},
                                    {"stream", true},
                                    {"stream_options", {{"include_usage", true}}}});
  EXPECT_THAT(streamed.headers, HasSubstr("text/event-stream"));
  std::string text;
  json usage;
  std::vector<std::string> events = absl::StrSplit(streamed.body, "\n\n", absl::SkipEmpty());
  ASSERT_GE(events.size(), 4u);
  EXPECT_EQ(events.back(), "data: [DONE]");
  events.pop_back();
  for (const std::string& event : events) {
    const json chunk = json::parse(event.substr(6));
    if (chunk.contains("usage")) usage = chunk["usage"];
    for (const json& choice : chunk["choices"]) text += choice["delta"].value("content", "");
  }
  EXPECT_EQ(text, answer_);
  EXPECT_EQ(usage["completion_tokens"], answer["usage"]["completion_tokens"]);
}

TEST_F(ApiTest, Stop_AndMaxTokens_EndAnAnswer) {
  Start();
  const std::string stop = answer_.substr(answer_.size() / 2, 2);
  const json cut = json::parse(Post("/v1/completions", Completion({{"stop", stop}})).body);
  EXPECT_EQ(cut["choices"][0]["text"], answer_.substr(0, answer_.find(stop)));
  EXPECT_EQ(cut["choices"][0]["finish_reason"], "stop");
  const json shorter = json::parse(Post("/v1/completions", Completion({{"max_tokens", 1}})).body);
  EXPECT_EQ(shorter["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(shorter["usage"]["completion_tokens"], 1);
  // The same seed, the same answer.
  const json sampled = {{"temperature", 2}, {"seed", 5}, {"max_tokens", 8}};
  EXPECT_EQ(json::parse(Post("/v1/completions", Completion(sampled)).body)["choices"],
            json::parse(Post("/v1/completions", Completion(sampled)).body)["choices"]);
}

TEST_F(ApiTest, WhatCannotBe_IsAnErrorInOpenAIsForm) {
  Start();
  const auto error = [&](const std::string& target, const json& body) {
    const TestClient::Response response = Post(target, body);
    const json parsed = json::parse(response.body, nullptr, false);
    EXPECT_TRUE(parsed.is_object() && parsed.contains("error")) << response.body;
    return absl::StrCat(response.status, " ", parsed["error"].value("message", ""));
  };
  EXPECT_THAT(error("/v1/completions", Completion({{"model", "other"}})),
              HasSubstr("404 no model \"other\""));
  EXPECT_THAT(error("/v1/completions", Completion({{"context", "none"}})),
              HasSubstr("404 no context \"none\""));
  EXPECT_THAT(error("/v1/completions", Completion({{"max_tokens", -1}})),
              HasSubstr("400 max_tokens=-1"));
  EXPECT_THAT(error("/v1/completions", "text"), HasSubstr("400 "));
  EXPECT_THAT(error("/v1/nothing", {}), HasSubstr("404 "));
  EXPECT_THAT(
      error("/v1/chat/completions", {{"messages", {{{"role", "nobody"}, {"content", "x"}}}}}),
      testing::AllOf(HasSubstr("400 "), HasSubstr("nobody asks")));
  EXPECT_EQ(json::parse(Post("/v1/completions", Completion()).body)["choices"][0]["text"], answer_);
}

TEST_F(ApiTest, Models_AreTheModelAndItsContexts_AndHealthIsGood) {
  Start();
  TestClient client(address_);
  client.Send("GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n");
  const json models = json::parse(client.Receive().body);
  Texts ids;
  for (const json& model : models["data"]) ids.push_back(model["id"]);
  EXPECT_EQ(ids, (Texts{"demo", "demo@kept"}));
  client.Send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(json::parse(client.Receive().body)["status"], "ok");
}

TEST_F(ApiTest, AClientThatLeaves_LeavesTheThreadToOthers) {
  Start();
  {
    TestClient leaves(address_);
    leaves.Post(
        "/v1/completions",
        Completion({{"stream", true}, {"max_tokens", 1 << 20}, {"temperature", 2}, {"prompt", "x"}})
            .dump());
    EXPECT_THAT(leaves.ReadUntil("data: "), HasSubstr("200"));
  }
  EXPECT_EQ(json::parse(Post("/v1/completions", Completion()).body)["choices"][0]["text"], answer_);
}

TEST_F(ApiTest, Keys_AreWanted_AndContextsThatAKeyDoesNotSeeAreNotFound) {
  const json made = JsonOf(Carrel({"keys", "new", "a", "--contexts", "mine/*", "--json"}));
  const std::string key = made["key"];
  const std::string keys =
      WriteFile("keys.json", json{{"keys", json::array({made["entry"]})}}.dump());
  Start({"--keys", keys});
  EXPECT_EQ(Post("/v1/completions", Completion()).status, 401);
  const std::string header = absl::StrCat("Authorization: Bearer ", key, "\r\n");
  const TestClient::Response hidden = Post("/v1/completions", Completion(), header);
  const TestClient::Response missing =
      Post("/v1/completions", Completion({{"context", "none"}}), header);
  EXPECT_EQ(hidden.status, 404);
  EXPECT_EQ(missing.status, 404);
  EXPECT_EQ(Post("/v1/completions", {{"prompt", "x"}, {"max_tokens", 1}}, header).status, 200);
}

TEST_F(ApiTest, AnAddressForOthers_IsRefused) {
  const Outcome outcome =
      Carrel({"api", "--model", model_->folder(), "--store", store_, "--listen", "0.0.0.0:0"});
  EXPECT_NE(outcome.exit_code, 0);
  EXPECT_THAT(outcome.err, HasSubstr("0.0.0.0:0"));
}

}  // namespace
}  // namespace carrel::cli
