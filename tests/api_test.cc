// carrel api as its clients see it: OpenAI's API over a context, with the demo model and a template of its own.
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/test_folders.h"
#include "http_api/http_test_util.h"
#include "tests/api_world.h"
#include "tests/demo_gguf.h"

namespace carrel::cli {
namespace {

using http_api::TestClient;
using nlohmann::json;
using testing::HasSubstr;

TEST_F(ApiTest, Completions_SayWhatAskSays_WholeAndStreamed) {
  Start();
  const TestClient::Response whole = Post("/v1/completions", Completion());
  ASSERT_EQ(whole.status, 200) << whole.body;
  const json answer = json::parse(whole.body);
  EXPECT_EQ(answer["choices"][0]["text"], answer_);
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "stop");
  // The prompt says the document's last token anew (decision 082).
  EXPECT_EQ(answer["usage"]["prompt_tokens_details"]["cached_tokens"], kept_tokens_ - 1);
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

// The server's own flags are of no one document: a short one has fewer rows than asked, and one that is all sink and
// local rows was not measured.
TEST_F(ApiTest, DocumentsShorterThanTheServersFlags_AreAnswered) {
  const std::string short_text = ReadBytes(DemoDocument("registry-512")).substr(0, 600);
  const std::string tiny_text = short_text.substr(0, 60);
  for (const Args& rows : {Args{"--top-k", "512"}, Args{"--fidelity", "faithful"},
                           Args{"--target-error", "0.01"}, Args{}}) {
    SCOPED_TRACE(absl::StrJoin(rows, " "));
    rows_ = rows;
    Start();
    for (const auto& [name, text] : {std::pair{"short", short_text}, {"tiny", tiny_text}}) {
      SCOPED_TRACE(name);
      ASSERT_EQ(PostText(name, text).status, 202);
      const json ready = Events(name).back();
      ASSERT_EQ(ready["state"], "ready") << ready;
      EXPECT_LE(ready["tokens"], name == std::string("tiny") ? 68 : 511) << ready;
      const TestClient::Response answered =
          Post("/v1/completions", Completion({{"context", name}, {"max_tokens", 4}}));
      EXPECT_EQ(answered.status, 200) << answered.body;
      EXPECT_EQ(Ask("DELETE", absl::StrCat("/v1/contexts/", name)).status, 200);
    }
    process_->Signal(SIGTERM);
    EXPECT_THAT(process_->Wait(), Succeeds());
  }
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
  EXPECT_THAT(error("/v1/completions", Completion({{"max_tokens", -2}})),
              HasSubstr("400 max_tokens=-2"));
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
  client.Send("GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
  const json models = json::parse(client.Receive().body);
  Texts ids;
  for (const json& model : models["data"]) ids.push_back(model["id"]);
  EXPECT_EQ(ids, (Texts{"demo", "demo@kept"}));
  client.Send("GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
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

TEST_F(ApiTest, ASignal_EndsAnAnswerAndADocumentInTheMiddle) {
  Start();
  TestClient asks(address_);
  asks.Post("/v1/completions",
            Completion({{"stream", true}, {"max_tokens", 1 << 16}, {"temperature", 2}}).dump());
  asks.ReadUntil("data: ");
  ASSERT_EQ(PostText("long", LongText()).status, 202);
  TestClient watches(address_);
  watches.Ask("GET", "/v1/contexts/long/events");
  watches.ReadUntil("data: ");
  process_->Signal(SIGTERM);
  EXPECT_THAT(process_->Wait(), Succeeds());
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

TEST_F(ApiTest, Documents_AreReadOnce_AndAnswered) {
  Start();
  const std::string text = ReadBytes(DemoDocument("registry-2k"));
  const TestClient::Response posted = PostText("more", text);
  ASSERT_EQ(posted.status, 202) << posted.body;
  const std::vector<json> events = Events("more");
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events.back()["state"], "ready") << events.back();
  EXPECT_GT(events.back()["bytes"], 0);
  EXPECT_GE(events.size(), 2u);
  for (size_t i = 1; i < events.size(); ++i) {
    EXPECT_GE(events[i]["progress"], events[i - 1]["progress"]);
  }
  EXPECT_EQ(json::parse(Ask("GET", "/v1/contexts/more").body), events.back());
  EXPECT_EQ(Contexts(), (Texts{"kept", "more"}));
  // The same text again is the context that is there, and as JSON, too; it has one name.
  const auto again = [&](const std::string& name) {
    return Post("/v1/contexts", {{"name", name}, {"text", text}},
                "Content-Type: application/json\r\n");
  };
  for (const char* name : {"more", ""}) {
    const TestClient::Response same = again(name);
    EXPECT_EQ(same.status, 200) << same.body;
    EXPECT_EQ(json::parse(same.body)["existed"], true);
    EXPECT_EQ(json::parse(same.body)["name"], "more");
  }
  const TestClient::Response other = again("twice");
  EXPECT_EQ(other.status, 409);
  EXPECT_EQ(json::parse(other.body)["error"]["code"], "context_exists");
  EXPECT_THAT(other.body, HasSubstr("\\\"more\\\""));
  // So is what prefill made of it.
  EXPECT_THAT(PostText("x", ReadBytes(document_)).body, HasSubstr("\\\"kept\\\""));
  const json answer =
      json::parse(Post("/v1/completions", Completion({{"model", "demo@more"}})).body);
  EXPECT_EQ(answer["carrel"]["context"], "more");
  EXPECT_GT(answer["carrel"]["rows_read"], 0);
  EXPECT_THAT(answer["carrel"]["plan"].get<std::string>(), testing::StartsWith("store"));
  // It is deleted although its decoder stayed open.
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/more").status, 200);
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/more").status, 404);
  EXPECT_EQ(Ask("GET", "/v1/contexts/more/events").status, 404);
  EXPECT_EQ(Contexts(), (Texts{"kept"}));
}

TEST_F(ApiTest, ADocument_IsReadWhileOthersAreAnswered_AndCancelled) {
  Start({"--max-queued-documents", "1"});
  ASSERT_EQ(PostText("long", LongText()).status, 202);
  ASSERT_TRUE(WaitUntil([&] { return State("long") == "prefilling"; }));
  EXPECT_EQ(json::parse(Post("/v1/completions", Completion()).body)["choices"][0]["text"], answer_);
  EXPECT_EQ(State("long"), "prefilling");
  ASSERT_EQ(PostText("next", LongText() + "x").status, 202);
  EXPECT_EQ(State("next"), "queued");
  const TestClient::Response third = PostText("third", LongText() + "y");
  EXPECT_EQ(third.status, 429) << third.body;
  EXPECT_EQ(PostText("long", "another text").status, 409);
  TestClient watcher(address_);
  watcher.Ask("GET", "/v1/contexts/next/events");
  watcher.ReadUntil("queued");
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/next").status, 200);
  EXPECT_THAT(watcher.ReadUntil("[DONE]"), HasSubstr("cancelled"));
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/long").status, 200);
  EXPECT_EQ(Contexts(), (Texts{"kept"}));
  // Nothing is left of it, and its name is free.
  ASSERT_EQ(PostText("long", ReadBytes(DemoDocument("registry-2k"))).status, 202);
  EXPECT_EQ(Events("long").back()["state"], "ready");
  EXPECT_TRUE(std::filesystem::is_empty(store_ + "/prefill"));
}

// Whenever it is cancelled, the moments before and behind its publication among them.
TEST_F(ApiTest, ADocumentThatIsCancelledAtItsEnd_IsGone) {
  Start();
  const std::string text = ReadBytes(DemoDocument("registry-512"));
  std::mt19937_64 random(TestSeed());
  for (int trial = 0; trial < 15; ++trial) {
    ASSERT_EQ(PostText("late", text).status, 202) << "trial " << trial;
    // What is looked at may go meanwhile.
    const auto staged = [&] {
      std::error_code gone;
      const bool empty = std::filesystem::is_empty(store_ + "/prefill", gone);
      return !empty && !gone;
    };
    const absl::Time most = absl::Now() + absl::Seconds(20);
    while (!staged() && absl::Now() < most) absl::SleepFor(absl::Milliseconds(1));
    while (staged()) absl::SleepFor(absl::Microseconds(50));
    absl::SleepFor(absl::Microseconds(random() % 3000));
    EXPECT_EQ(Ask("DELETE", "/v1/contexts/late").status, 200);
    EXPECT_EQ(Contexts(), (Texts{"kept"}));
  }
}

TEST_F(ApiTest, DocumentsThatWait_GoOnByThemselves_WhateverEndedTheProcess) {
  const std::string text = ReadBytes(DemoDocument("registry-8k"));
  Start();
  ASSERT_EQ(PostText("long", text).status, 202);
  ASSERT_EQ(PostText("next", ReadBytes(DemoDocument("registry-2k"))).status, 202);
  ASSERT_EQ(PostText("gone", ReadBytes(DemoDocument("registry-512"))).status, 202);
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/gone").status, 200);
  // A layer's index may end long after its rows are computed.
  ASSERT_TRUE(WaitUntil([&] {
    return std::filesystem::exists(store_ + "/prefill/long/layer-0000") &&
           json::parse(Ask("GET", "/v1/contexts/long").body).value("progress", 0.0) > 0.3;
  }));
  process_->Signal(SIGKILL);
  (void)process_->Wait();
  Start();
  EXPECT_EQ(Contexts(), (Texts{"kept", "long", "next"}));
  process_->Signal(SIGTERM);
  EXPECT_THAT(process_->Wait(), Succeeds());
  Start();
  const std::vector<json> events = Events("long");
  EXPECT_EQ(events.back()["state"], "ready");
  for (const json& event : events) {
    if (event["state"] != "prefilling" || event["progress"] == 0) continue;
    EXPECT_GT(event["progress"], 0.12);  // the first of eight layers was done
    break;
  }
  EXPECT_EQ(Events("next").back()["state"], "ready");
  EXPECT_TRUE(std::filesystem::is_empty(store_ + "/waiting"));
}

TEST_F(ApiTest, ADocumentThatWaitsForAnotherModel_HasFailedAndSaysSo) {
  Start();
  ASSERT_EQ(PostText("long", LongText()).status, 202);
  process_->Signal(SIGKILL);
  (void)process_->Wait();
  model_->EditWeights([](TensorFile& file) { file.data[100] ^= 1; });
  Start();
  EXPECT_THAT(Ask("GET", "/v1/contexts/long").body, HasSubstr("under another model"));
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/long").status, 200);
  EXPECT_EQ(Contexts(), (Texts{"kept"}));
  EXPECT_TRUE(std::filesystem::is_empty(store_ + "/waiting"));
}

TEST_F(ApiTest, DocumentsThatCannotBe_AreRefusedByName) {
  Start({"--max-document-bytes", "20000"});
  const auto refused = [&](const TestClient::Response& response) {
    return absl::StrCat(response.status, " ", response.body);
  };
  EXPECT_THAT(refused(PostText("x", std::string(20001, 'x'))),
              testing::AllOf(HasSubstr("413 "), HasSubstr("20000")));
  EXPECT_THAT(refused(PostText("", "")), HasSubstr("400 "));
  EXPECT_THAT(refused(PostText("a%2Fb", "text")),
              testing::AllOf(HasSubstr("400 "), HasSubstr("a/b")));
  EXPECT_THAT(refused(PostText("x", "\xff\xff")), HasSubstr("UTF-8"));
  EXPECT_THAT(refused(PostText("kept", "another text")), HasSubstr("409 "));
  EXPECT_THAT(refused(Post("/v1/contexts", {{"name", "x"}}, "Content-Type: application/json\r\n")),
              HasSubstr("text is missing"));
  EXPECT_THAT(refused(Ask("PUT", "/v1/contexts")), HasSubstr("405 "));
  EXPECT_THAT(refused(Ask("GET", "/v1/contextsx")), HasSubstr("404 "));
  EXPECT_THAT(refused(Ask("DELETE", "/v1/contexts/none")), HasSubstr("404 "));
  EXPECT_EQ(Contexts(), (Texts{"kept"}));
  // A control token that somebody writes is text.
  const std::string sly = ReadBytes(document_) + "<|end_of_text|>";
  ASSERT_EQ(PostText("sly", sly).status, 202);
  EXPECT_GT(Events("sly").back()["tokens"], kept_tokens_ + 3);
}

// Whether a context can be chosen, and read, is what opening it says.
TEST_F(ApiTest, AContextThatCanBeAsked_IsUsable) {
  const auto expect_usable = [&](const std::string& name, bool usable) {
    EXPECT_EQ(json::parse(Ask("GET", "/v1/contexts/" + name).body)["usable"], usable) << name;
    EXPECT_EQ(Ask("GET", absl::StrCat("/v1/contexts/", name, "/text")).status, usable ? 200 : 409);
    const TestClient::Response asked = Post("/v1/completions", Completion({{"context", name}}));
    EXPECT_EQ(asked.status, usable ? 200 : 409) << asked.body;
  };
  ASSERT_THAT(Carrel(Prefill("raw", {"--key-position", "none"})), Succeeds());
  const auto start = [&](const Args& more) {
    process_ = nullptr;
    Start(more);
  };
  start({});
  expect_usable("kept", true);
  expect_usable("raw", false);
  start({"--zone", "host", "--lab", "rope=infinitehip"});
  expect_usable("kept", false);
  expect_usable("raw", true);
  served_ = WriteFile("demo.gguf", DemoGguf(kernels::GgufType::kQ8_0).Bytes());
  start({});
  expect_usable("kept", false);
  start({"--weights", "derived"});
  expect_usable("kept", true);
  EXPECT_EQ(Ask("GET", "/v1/contexts/kept/text").body, ReadBytes(document_));
}

TEST_F(ApiTest, AStoreThatIsOnlyRead_TakesNoDocuments) {
  Start({"--read-only"});
  const TestClient::Response posted = PostText("x", "text");
  EXPECT_EQ(posted.status, 409);
  EXPECT_THAT(posted.body, HasSubstr("--read-only"));
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/kept").status, 409);
  // What another process publishes meanwhile is there: asked for by name at once, in the list within a second.
  EXPECT_THAT(Carrel(Prefill("second", {"--input", DemoDocument("registry-2k")})), Succeeds());
  EXPECT_EQ(Ask("GET", "/v1/contexts/second").status, 200);
  EXPECT_EQ(Contexts(), (Texts{"kept", "second"}));
  const Outcome kept = Carrel({"api", "--model", model_->folder(), "--store", store_, "--read-only",
                               "--keep-documents", "1"});
  EXPECT_THAT(kept.err, HasSubstr("--keep-documents"));
}

TEST_F(ApiTest, APromptThatBeginsWithADocument_IsAnsweredFromIt) {
  Start();
  const std::string text = ReadBytes(DemoDocument("registry-512"));
  ASSERT_EQ(PostText("doc", text).status, 202);
  const json made = Events("doc").back();
  const json body = {{"prompt", text + kQuestion}, {"temperature", 0}, {"max_tokens", 64}};
  const json answer = json::parse(Post("/v1/completions", body).body);
  const json named = json::parse(Post("/v1/completions", Completion({{"context", "doc"}})).body);
  EXPECT_EQ(answer["choices"], named["choices"]) << answer;
  EXPECT_EQ(answer["usage"], named["usage"]);
  // The prompt says the document's last token anew, or reads it again (decision 082).
  const int64_t cached = made["tokens"].get<int64_t>() - 1;
  EXPECT_EQ(answer["usage"]["prompt_tokens_details"]["cached_tokens"], cached);
  EXPECT_EQ(answer["carrel"]["context"], "doc");
  EXPECT_EQ(answer["carrel"]["recognised"], true);
  // One letter of its middle is another: it is another document.
  std::string changed = text;
  changed[changed.size() / 2] = changed[changed.size() / 2] == 'e' ? 'a' : 'e';
  const json other = json::parse(
      Post("/v1/completions", {{"prompt", changed + kQuestion}, {"max_tokens", 1}}).body);
  EXPECT_EQ(other["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
  const json alone =
      json::parse(Post("/v1/completions", {{"prompt", text}, {"max_tokens", 1}}).body);
  EXPECT_EQ(alone["usage"]["prompt_tokens_details"]["cached_tokens"], cached);
  // The longest one wins.
  const std::string longer = text + "\n\n" + ReadBytes(DemoDocument("registry-2k"));
  ASSERT_EQ(PostText("longer", longer).status, 202);
  ASSERT_EQ(Events("longer").back()["state"], "ready");
  const json longest = json::parse(
      Post("/v1/completions", {{"prompt", longer + kQuestion}, {"max_tokens", 1}}).body);
  EXPECT_EQ(longest["carrel"]["context"], "longer");
}

TEST_F(ApiTest, ARepetitionPenalty_CountsAPromptsDocument_RecognisedOrNot) {
  Start();
  const std::string text = ReadBytes(DemoDocument("registry-512"));
  json body = {{"prompt", text + kQuestion}, {"temperature", 0}, {"max_tokens", 16}};
  const auto ask = [&] { return json::parse(Post("/v1/completions", body).body); };
  const json plain = ask();
  body["repetition_penalty"] = 4;
  const json read = ask();
  EXPECT_NE(read["choices"][0]["text"], plain["choices"][0]["text"]);
  ASSERT_EQ(PostText("doc", text).status, 202);
  ASSERT_EQ(Events("doc").back()["state"], "ready");
  const json recognised = ask();
  ASSERT_EQ(recognised["carrel"]["recognised"], true) << recognised;
  EXPECT_EQ(recognised["choices"][0]["text"], read["choices"][0]["text"]);
}

TEST_F(ApiTest, LongDocumentsOfPrompts_AreKept_AsManyAsMay) {
  Start({"--keep-documents", "1", "--keep-tokens", "1000"});
  const std::string first = ReadBytes(DemoDocument("registry-2k")),
                    second = ReadBytes(DemoDocument("registry-8k")).substr(0, 20000);
  const auto ask = [&](const std::string& text, bool stream) {
    const json messages = json::array({{{"role", "user"}, {"content", text + kQuestion}}});
    return Post("/v1/chat/completions", {{"messages", messages},
                                         {"temperature", 0},
                                         {"stream", stream},
                                         {"stream_options", {{"include_usage", stream}}}});
  };
  const json asked = json::parse(ask(first, false).body);
  EXPECT_GT(asked["usage"]["prompt_tokens_details"]["cached_tokens"], 1000) << asked;
  const Texts names = Contexts();
  ASSERT_EQ(names.size(), 2u);
  EXPECT_EQ(asked["carrel"]["context"], names[1]);  // behind "kept"
  const json again = json::parse(ask(first, false).body);
  EXPECT_EQ(again["choices"], asked["choices"]);
  EXPECT_EQ(again["usage"], asked["usage"]);
  EXPECT_EQ(Contexts(), names);
  // The other one takes its place; a stream goes on meanwhile.
  const TestClient::Response streamed = ask(second, true);
  EXPECT_THAT(streamed.body, HasSubstr("[DONE]"));
  EXPECT_THAT(streamed.body, HasSubstr("\"recognised\":true"));
  const Texts now = Contexts();
  ASSERT_EQ(now.size(), 2u);
  EXPECT_NE(now, names);
  // A short one is read as it is.
  const json brief = json::parse(ask("A word.\n\n", false).body);
  EXPECT_EQ(brief["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
  EXPECT_EQ(Contexts(), now);
}

TEST_F(ApiTest, Keys_MakeSeeAndDelete_WhatTheyMay) {
  const json mine = JsonOf(Carrel({"keys", "new", "a", "--contexts", "mine*", "--rights",
                                   "list,open,import,delete", "--json"}));
  const json reads = JsonOf(Carrel({"keys", "new", "b", "--contexts", "*", "--json"}));
  const std::string keys =
      WriteFile("keys.json", json{{"keys", json::array({mine["entry"], reads["entry"]})}}.dump());
  ASSERT_THAT(Carrel(Prefill("other", {"--input", DemoDocument("registry-512")})), Succeeds());
  Start({"--keys", keys});
  const auto header = [](const json& made) {
    return absl::StrCat("Authorization: Bearer ", made["key"].get<std::string>(), "\r\n");
  };
  const std::string text = ReadBytes(DemoDocument("registry-512"));
  EXPECT_EQ(Ask("GET", "/v1/contexts").status, 401);
  EXPECT_EQ(PostText("x", text, header(reads)).status, 403);
  EXPECT_EQ(PostText("x", text, header(mine)).status, 403);
  EXPECT_EQ(Contexts(header(mine)), Texts());
  EXPECT_EQ(Contexts(header(reads)), (Texts{"kept", "other"}));
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/kept", header(mine)).status, 404);
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/kept", header(reads)).status, 403);
  // Neither by a copy of its own nor by a prompt does a key learn what others have.
  const json prompt = {{"prompt", text + kQuestion}, {"max_tokens", 1}};
  EXPECT_EQ(json::parse(Post("/v1/completions", prompt, header(mine)).body)["carrel"]["context"],
            nullptr);
  EXPECT_EQ(json::parse(Post("/v1/completions", prompt, header(reads)).body)["carrel"]["context"],
            "other");
  const TestClient::Response posted = PostText("mine-1", text, header(mine));
  EXPECT_EQ(posted.status, 202) << posted.body;
  ASSERT_TRUE(WaitUntil([&] {
    return json::parse(Ask("GET", "/v1/contexts/mine-1", header(mine)).body)["state"] == "ready";
  }));
  EXPECT_EQ(json::parse(Post("/v1/completions", prompt, header(mine)).body)["carrel"]["context"],
            "mine-1");
  EXPECT_EQ(Ask("DELETE", "/v1/contexts/mine-1", header(mine)).status, 200);
}

TEST_F(ApiTest, Sources_AreWhereTheAnswerStands_AndChangeNothing) {
  Start();
  const std::string text = Ask("GET", "/v1/contexts/kept/text").body;
  EXPECT_THAT(text, HasSubstr("Miathlio Ceatiabu"));
  const json plain = json::parse(Post("/v1/completions", Completion()).body);
  EXPECT_FALSE(plain["carrel"].contains("sources"));
  const json with = json::parse(Post("/v1/completions", Completion({{"sources", 3}})).body);
  EXPECT_EQ(with["choices"], plain["choices"]);
  const json sources = with["carrel"]["sources"];
  ASSERT_GE(sources.size(), 1u);
  ASSERT_LE(sources.size(), 3u);
  bool found = false;
  double before = 1;
  for (const json& source : sources) {
    const size_t begin = source["bytes"][0], end = source["bytes"][1];
    EXPECT_EQ(source["text"], text.substr(begin, end - begin));
    EXPECT_LT(source["tokens"][0], source["tokens"][1]);
    EXPECT_LE(source["share"], before);
    before = source["share"];
    found |= absl::StrContains(source["text"].get<std::string>(), "Miathlio Ceatiabu");
  }
  EXPECT_TRUE(found) << sources;
  // Streamed, the last chunk has them.
  const std::string streamed =
      Post("/v1/completions", Completion({{"sources", 3}, {"stream", true}})).body;
  EXPECT_THAT(streamed, HasSubstr(absl::StrCat("\"sources\":", sources.dump())));
  // Without a context there are none.
  const json alone = json::parse(
      Post("/v1/completions", {{"prompt", "x"}, {"max_tokens", 1}, {"sources", 3}}).body);
  EXPECT_EQ(alone["carrel"]["sources"], json::array());
  EXPECT_EQ(Post("/v1/completions", Completion({{"sources", 101}})).status, 400);
  // ask and eval have the same.
  const Outcome asked = Carrel(StoreTest::Ask("kept", {"--sources", "3"}));
  EXPECT_THAT(asked, Succeeds());
  EXPECT_THAT(asked.err, HasSubstr("Miathlio Ceatiabu"));
}

TEST_F(ApiTest, AConversation_GoesOnWhereItWas) {
  Start();
  const auto cached = [](const json& answer) -> int64_t {
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"];
  };
  const json first = json::parse(Post("/v1/completions", Completion()).body);
  EXPECT_EQ(cached(first), kept_tokens_ - 1);
  const std::string prompt =
      absl::StrCat(kQuestion, first["choices"][0]["text"].get<std::string>(), kQuestion);
  const json second = json::parse(Post("/v1/completions", Completion({{"prompt", prompt}})).body);
  const int64_t read = second["usage"]["prompt_tokens"].get<int64_t>() - cached(second);
  // Of the first turn nothing is read again: to learn that the answer was over, all of it was fed back.
  const int64_t first_prompt = first["usage"]["prompt_tokens"].get<int64_t>() - kept_tokens_;
  EXPECT_EQ(cached(second) - kept_tokens_,
            first_prompt + first["usage"]["completion_tokens"].get<int64_t>());
  EXPECT_GT(read, 0);
  // The same from a server that has not heard the first turn.
  process_->Signal(SIGTERM);
  EXPECT_THAT(process_->Wait(), Succeeds());
  Start({"--max-sequences", "0"});
  const json anew = json::parse(Post("/v1/completions", Completion({{"prompt", prompt}})).body);
  EXPECT_EQ(anew["choices"], second["choices"]);
  EXPECT_EQ(cached(anew), kept_tokens_ - 1);
}

TEST_F(ApiTest, AConversationThatWasIdle_ComesBackFromItsFile) {
  Start({"--idle-after", "1s"});
  const json first = json::parse(Post("/v1/completions", Completion()).body);
  ASSERT_TRUE(WaitUntil([&] {
    return absl::StrContains(Ask("GET", "/metrics").body, "carrel_api_sequences_in_files 1\n");
  }));
  const std::string prompt =
      absl::StrCat(kQuestion, first["choices"][0]["text"].get<std::string>(), kQuestion);
  const json second = json::parse(Post("/v1/completions", Completion({{"prompt", prompt}})).body);
  EXPECT_GT(second["usage"]["prompt_tokens_details"]["cached_tokens"], kept_tokens_);
  EXPECT_THAT(Ask("GET", "/metrics").body, HasSubstr("carrel_api_sequences_in_files 0\n"));
}

TEST_F(ApiTest, ChatAndAsk_OverAStoreAndOverTheApi_SayTheSame) {
  model_->EditJson("tokenizer_config.json",
                   [](nlohmann::ordered_json& config) { config.erase("chat_template"); });
  const std::string answer(absl::StripAsciiWhitespace(answer_));
  Command chat;
  chat.args = {"chat",      "--model", DemoModel(), "--store", store_,
               "--context", "kept",    "--top-k",   "all"};
  // Several turns, a source by its number, a message of two lines, and the end of the file.
  chat.input =
      "What is the badge number of Miathlio Ceatiabu?\n1\n/nonsense\n/new\n"
      "What is the badge number\\\nof Miathlio Ceatiabu?\n";
  const Outcome here = Carrel(chat);
  EXPECT_THAT(here, Succeeds());
  EXPECT_THAT(here.out, testing::StartsWith(answer + "\n[1] "));
  EXPECT_THAT(here.out, HasSubstr("There is no /nonsense."));
  EXPECT_THAT(here.out, HasSubstr("[1] bytes "));
  Start();
  const std::string url = absl::StrCat("http://", address_);
  chat.args = {"chat", "--api", url, "--context", "kept"};
  const Outcome there = Carrel(chat);
  EXPECT_THAT(there, Succeeds());
  EXPECT_EQ(there.out, here.out);
  const Outcome asked =
      Carrel({"ask", "--api", url, "--context", "kept", "--json", "--sources", "2", kQuestion});
  EXPECT_THAT(asked, Succeeds());
  EXPECT_EQ(JsonOf(asked)["text"], answer_);
  EXPECT_GE(JsonOf(asked)["sources"].size(), 1u);
  // What the server does not take is refused, not ignored; what it refuses is told in its words.
  EXPECT_THAT(Carrel({"ask", "--api", url, "--context", "kept", "--top-k", "3", "x"}),
              FailsWith(2, Texts{"--top-k", "server's"}));
  EXPECT_THAT(Carrel({"ask", "--api", url, "--context", "none", "x"}), FailsWith(1, Texts{"none"}));
  EXPECT_THAT(Carrel({"ask", "--api", "https://127.0.0.1", "x"}),
              FailsWith(2, Texts{"https://127.0.0.1"}));
  EXPECT_THAT(Carrel({"chat", "--context", "kept"}), FailsWith(2, Texts{"--model", "--api"}));
}

TEST_F(ApiTest, PagesOfOthers_AreRefused) {
  Start();
  EXPECT_EQ(Ask("GET", "/health", "Origin: http://evil.example\r\n").status, 403);
  EXPECT_EQ(Ask("GET", "/health", "Sec-Fetch-Site: cross-site\r\n").status, 403);
  EXPECT_EQ(Ask("GET", "/health", "Sec-Fetch-Site: same-origin\r\n").status, 200);
  EXPECT_EQ(Ask("GET", "/health", "Origin: http://127.0.0.1\r\n").status, 200);
  for (const auto& [host, status] : {std::pair{"evil.example:8080", 403},
                                     {"localhost:8080", 200},
                                     {"[::1]:8080", 200},
                                     {"127.0.0.1", 200},
                                     {"127.0.0.1.evil.example", 403}}) {
    TestClient client(address_);
    client.Send(absl::StrCat("GET /health HTTP/1.1\r\nHost: ", host, "\r\n\r\n"));
    EXPECT_EQ(client.Receive().status, status) << host;
  }
}

TEST_F(ApiTest, Metrics_CountWhatWasAsked_AndAreAllDocumented) {
  Start();
  ASSERT_EQ(Post("/v1/completions", Completion()).status, 200);
  ASSERT_EQ(Post("/v1/completions", Completion({{"context", "none"}})).status, 404);
  ASSERT_EQ(PostText("more", ReadBytes(DemoDocument("registry-2k"))).status, 202);
  ASSERT_EQ(Events("more").back()["state"], "ready");
  const std::string metrics = Ask("GET", "/metrics").body;
  for (const std::string& line :
       {std::string("carrel_api_requests_total{route=\"/v1/completions\",status=\"OK\"} 1"),
        std::string("carrel_api_requests_total{route=\"/v1/completions\",status=\"NOT_FOUND\"} 1"),
        std::string("carrel_api_answers_total{finish=\"stop\"} 1"),
        absl::StrCat("carrel_api_tokens_total{kind=\"context\"} ", kept_tokens_ - 1),
        std::string("carrel_api_first_token_seconds_count 1"),
        std::string("carrel_api_documents_total{end=\"ready\"} 1"),
        std::string("carrel_api_documents_waiting 0")}) {
    EXPECT_THAT(metrics, HasSubstr(line + "\n"));
  }
  const std::string readme = ReadBytes(SourceFolder() + "/http_api/README.md");
  for (const absl::string_view line : absl::StrSplit(metrics, '\n')) {
    if (!absl::StartsWith(line, "# TYPE carrel_api_")) continue;
    const absl::string_view name = line.substr(7, line.find(' ', 7) - 7);
    EXPECT_THAT(readme, HasSubstr(absl::StrCat("`", name, "`")));
  }
}

TEST_F(ApiTest, ThePage_IsOneFile_ThatItsPolicyNames) {
  Start();
  const TestClient::Response page = Ask("GET", "/");
  EXPECT_EQ(page.status, 200);
  EXPECT_THAT(page.headers, HasSubstr("text/html; charset=utf-8"));
  EXPECT_THAT(page.headers, HasSubstr("default-src 'none'; script-src 'sha256-"));
  EXPECT_THAT(page.body, HasSubstr("<title>Carrel</title>"));
  for (const char* outside : {"src=", "http:", "https:", "innerHTML", "onclick"}) {
    EXPECT_THAT(page.body, testing::Not(HasSubstr(outside)));
  }
}

TEST_F(ApiTest, AnAddressForOthers_IsRefused) {
  const Outcome outcome =
      Carrel({"api", "--model", model_->folder(), "--store", store_, "--listen", "0.0.0.0:0"});
  EXPECT_NE(outcome.exit_code, 0);
  EXPECT_THAT(outcome.err, HasSubstr("0.0.0.0:0"));
}

}  // namespace
}  // namespace carrel::cli
