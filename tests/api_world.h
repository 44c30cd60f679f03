// What: carrel api as a process of its own, over a store with the demo model and a chat template. Tests only.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/test_folders.h"
#include "http_api/http_test_util.h"
#include "tests/cli_world.h"

namespace carrel::cli {

using http_api::TestClient;
using nlohmann::json;

// A chat is its last message alone: the demo model knows questions, not chats.
inline constexpr char kTemplate[] =
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

  void Start(const Args& more = {}, int64_t max_file_bytes = -1) {
    Command command;
    command.max_file_bytes = max_file_bytes;
    command.args = With(With({"api", "--model", served_.empty() ? model_->folder() : served_,
                              "--store", store_, "--listen", "127.0.0.1:0", "--model-name", "demo"},
                             rows_),
                        more);
    process_ = Process::Start(command);
    ASSERT_TRUE(WaitUntil([&] {
      return process_->err().find("/v1\n") != std::string::npos || !process_->Running();
    }));
    const std::string said = process_->err(), before = "http://";
    const size_t at = said.find(before);
    ASSERT_NE(at, std::string::npos) << said;
    address_ = said.substr(at + before.size(), said.find("/v1", at) - at - before.size());
    ASSERT_TRUE(WaitUntil([&] {
      return process_->err().find("may") != std::string::npos;  // who may do what comes last
    }));
    token_.clear();
    const std::string all = process_->err();
    if (const size_t token = all.find("#token="); token != std::string::npos) {
      token_ = all.substr(token + 7, all.find('\n', token) - token - 7);
    }
  }

  // Whoever presents no key presents the token, if there is one.
  std::string As(const std::string& headers) const {
    if (token_.empty() || headers.find("Authorization") != std::string::npos) return headers;
    return absl::StrCat(headers, "Authorization: Bearer ", token_, "\r\n");
  }

  TestClient::Response Post(const std::string& target, const json& body,
                            const std::string& headers = "") {
    TestClient client(address_);
    client.Post(target, body.dump(), As(headers));
    return client.Receive();
  }

  TestClient::Response Ask(const std::string& method, const std::string& target,
                           const std::string& headers = "") {
    TestClient client(address_);
    client.Ask(method, target, As(headers));
    return client.Receive();
  }

  // The text as it is.
  TestClient::Response PostText(const std::string& name, const std::string& text,
                                const std::string& headers = "") {
    TestClient client(address_);
    client.Post(absl::StrCat("/v1/contexts?name=", name), text,
                As(absl::StrCat("Content-Type: text/plain\r\n", headers)));
    return client.Receive();
  }

  // What the events of a document said until they ended.
  std::vector<json> Events(const std::string& name) {
    std::vector<json> events;
    const TestClient::Response response =
        Ask("GET", absl::StrCat("/v1/contexts/", name, "/events"));
    for (const absl::string_view event : absl::StrSplit(response.body, "\n\n", absl::SkipEmpty())) {
      if (event != "data: [DONE]") events.push_back(json::parse(event.substr(6)));
    }
    return events;
  }

  std::string State(const std::string& name) {
    const json document = json::parse(Ask("GET", absl::StrCat("/v1/contexts/", name)).body);
    return document.value("state", document.dump());
  }

  Texts Contexts(const std::string& headers = "") {
    Texts names;
    const json listed = json::parse(Ask("GET", "/v1/contexts", headers).body);
    for (const json& context : listed.value("data", json::array())) {
      names.push_back(context["name"]);
    }
    return names;
  }

  // Takes some seconds to prefill.
  static std::string LongText() {
    std::string text;
    for (int i = 0; i < 2; ++i)
      absl::StrAppend(&text, ReadBytes(DemoDocument("registry-8k")), "\n");
    return text;
  }

  json Completion(const json& more = {}) {
    json body = {
        {"model", "demo@kept"}, {"prompt", kQuestion}, {"temperature", 0}, {"max_tokens", 64}};
    if (!more.is_null()) body.update(more);
    if (body.contains("context")) body["model"] = "demo";
    return body;
  }

  std::unique_ptr<ModelCopy> model_;
  std::string served_;  // instead of it; empty: none
  Args rows_ = {"--top-k", "all"};
  std::unique_ptr<Process> process_;
  std::string address_, token_;
};

}  // namespace carrel::cli
