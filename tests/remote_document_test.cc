// What a server tells of its documents: sources, recognition and texts are those of a store in the process.
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/test_folders.h"
#include "http_api/http_test_util.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

using http_api::TestClient;
using nlohmann::json;
using testing::HasSubstr;

constexpr int kFailed = 1;

class RemoteDocumentTest : public StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    address_ = "unix:" + SocketPath();
    text_ = ReadBytes(DemoDocument("registry-512"));
    ASSERT_THAT(Carrel(Prefill("whole", {"--input", DemoDocument("registry-512")})), Succeeds());
  }

  // carrel api; its address.
  std::string StartApi(const Args& store) {
    apis_.push_back(Process::Start({.args = With({"api", "--model", DemoModel(), "--model-name",
                                                  "demo", "--listen", "127.0.0.1:0"},
                                                 store)}));
    Process& api = *apis_.back();
    EXPECT_TRUE(
        WaitUntil([&] { return api.err().find("/v1\n") != std::string::npos || !api.Running(); }));
    const std::string said = api.err(), before = "http://";
    const size_t at = said.find(before);
    EXPECT_NE(at, std::string::npos) << said;
    return said.substr(at + before.size(), said.find("/v1", at) - at - before.size());
  }

  static json Complete(const std::string& api, const json& more) {
    json body = {{"temperature", 0}, {"max_tokens", 32}, {"sources", 3}};
    body.update(more);
    TestClient client(api);
    client.Post("/v1/completions", body.dump());
    const TestClient::Response response = client.Receive();
    EXPECT_EQ(response.status, 200) << response.body;
    return json::parse(response.body, nullptr, false);
  }
  static std::string Get(const std::string& api, const std::string& target) {
    TestClient client(api);
    client.Ask("GET", target);
    return client.Receive().body;
  }
  // Of an answer, all but how long it took.
  static json Facts(json answer) {
    for (const char* field : {"id", "created"}) answer.erase(field);
    for (const char* field : {"prompt_ms", "ms_per_token"}) answer["carrel"].erase(field);
    answer["carrel"]["sampling"].erase("seed");
    return answer;
  }

  std::string address_, text_;
  std::vector<std::unique_ptr<Process>> apis_;
};

TEST_F(RemoteDocumentTest, Sources_OfAskAndEval_AreThoseOfTheStore) {
  const Args ask = {"--json", "--sources", "3"};
  const Args eval = {
      "eval",        "--model",
      DemoModel(),   "--context",
      "whole",       "--sources",
      "3",           "--json",
      "--top-k",     "all",
      "--questions", SourceFolder() + "/models/demo/docs/registry-512.questions.jsonl"};
  const json asked = JsonOf(Carrel(Ask("whole", ask)));
  const json evaluated = JsonOf(Carrel(With(eval, {"--store", store_})));
  EXPECT_GE(asked["sources"].size(), 1u);
  const Server server(store_, address_);
  const json asked_there = JsonOf(Carrel(Ask("whole", With(ask, {"--server", address_}))));
  EXPECT_EQ(asked_there["text"], asked["text"]);
  EXPECT_EQ(asked_there["sources"], asked["sources"]);
  const json evaluated_there = JsonOf(Carrel(With(eval, {"--server", address_})));
  for (const char* field : {"right", "sources"}) {
    ASSERT_TRUE(evaluated.contains(field)) << evaluated;
    json here = evaluated[field], there = evaluated_there[field];
    if (here.is_object()) {
      here.erase("seconds");
      there.erase("seconds");
    }
    EXPECT_EQ(there, here) << field;
  }
}

TEST_F(RemoteDocumentTest, Sources_WantTheRightToOpen_AndNoOther) {
  json entries = json::array();
  const auto key = [&](const std::string& name, const Args& more) {
    const json made = JsonOf(Carrel(With({"keys", "new", name, "--json"}, more)));
    entries.push_back(made["entry"]);
    const std::string file = WriteFile(name + ".key", std::string(made["key"]) + "\n");
    std::filesystem::permissions(file, std::filesystem::perms(0600));
    return file;
  };
  const std::string opens = key("opens", {"--rights", "open"}),
                    lists = key("lists", {"--rights", "list"}),
                    elsewhere = key("elsewhere", {"--rights", "open", "--contexts", "mine*"});
  const std::string keys = WriteFile("keys.json", json{{"keys", entries}}.dump());
  const auto process =
      Process::Start({.args = {"serve", "--store", store_, "--listen", address_, "--keys", keys}});
  ASSERT_TRUE(WaitUntil([&] { return process->err().find("ready on ") != std::string::npos; }));
  const auto ask = [&](const std::string& file) {
    return Carrel(Ask("whole", {"--server", address_, "--key-file", file, "--sources", "2"}));
  };
  const Outcome good = ask(opens);
  EXPECT_THAT(good, Succeeds());
  EXPECT_THAT(good.err, HasSubstr("Miathlio Ceatiabu"));
  EXPECT_THAT(ask(lists), FailsWith(kFailed, Texts{"PERMISSION_DENIED", "open"}));
  EXPECT_THAT(ask(elsewhere), FailsWith(kFailed, Texts{"NOT_FOUND", "whole"}));
}

TEST_F(RemoteDocumentTest, APromptThatBeginsWithADocument_IsAnsweredFromTheServersContext) {
  const json named = {{"model", "demo@whole"}, {"prompt", kQuestion}};
  const json whole = {{"prompt", text_ + kQuestion}};
  const std::string here = StartApi({"--store", store_, "--read-only"});
  const json named_here = Facts(Complete(here, named)), whole_here = Facts(Complete(here, whole));
  const std::string text_here = Get(here, "/v1/contexts/whole/text");
  EXPECT_EQ(whole_here["carrel"]["context"], "whole");
  EXPECT_EQ(whole_here["carrel"]["recognised"], true);
  EXPECT_GE(whole_here["carrel"]["sources"].size(), 1u);
  EXPECT_EQ(text_here, text_);
  const Server server(store_, address_);
  const std::string there = StartApi({"--server", address_});
  EXPECT_EQ(Facts(Complete(there, named)), named_here);
  EXPECT_EQ(Facts(Complete(there, whole)), whole_here);
  EXPECT_EQ(Get(there, "/v1/contexts/whole/text"), text_here);
}

// Another document takes the name; nothing of the one before is told or used for it.
TEST_F(RemoteDocumentTest, AContextThatIsAnotherNow_IsRecognisedByItsOwnTextAlone) {
  const std::string other = path("other"), stream = path("stream");
  ASSERT_THAT(Carrel({"prefill", "--model", DemoModel(), "--input", DemoDocument("registry-2k"),
                      "--store", other, "--name", "whole", "--quiet"}),
              Succeeds());
  ASSERT_THAT(Carrel({"export", "whole", stream, "--store", other}), Succeeds());
  const Server server(store_, address_);
  const std::string api = StartApi({"--server", address_});
  const auto context_of = [&](const std::string& text) {
    return Complete(api, {{"prompt", text + kQuestion}, {"max_tokens", 1}})["carrel"]["context"];
  };
  ASSERT_THAT(Carrel({"rm", "whole", "--server", address_}), Succeeds());
  ASSERT_THAT(Carrel({"import", stream, "--server", address_}), Succeeds());
  EXPECT_NE(context_of(text_), "whole");  // whether it has noticed or not
  const std::string now = ReadBytes(DemoDocument("registry-2k"));
  EXPECT_TRUE(WaitUntil([&] { return context_of(now) == "whole"; }));
  EXPECT_NE(context_of(text_), "whole");
}

}  // namespace
}  // namespace carrel::cli
