#include "http_api/completion.h"

#include <nlohmann/json.hpp>
#include <random>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;
using testing::HasSubstr;

TEST(CompletionTest, Chat_FieldsAreRead) {
  const auto request = ParseCompletion(true, R"({"model": "m@novel", "messages": [
      {"role": "system", "content": "be brief"},
      {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
      "max_completion_tokens": 7, "temperature": 0, "top_p": 0.5, "seed": -3, "stop": "x", "stream": true,
      "stream_options": {"include_usage": true}, "n": 1, "presence_penalty": 0, "tools": [], "user": "me"})");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->context, "novel");
  ASSERT_EQ(request->messages.size(), 2u);
  EXPECT_EQ(request->messages[1].content, "ab");
  EXPECT_EQ(request->max_tokens, 7);
  EXPECT_EQ(request->temperature, 0);
  EXPECT_EQ(request->top_p, 0.5);
  EXPECT_TRUE(request->seeded);
  EXPECT_EQ(request->stop, std::vector<std::string>{"x"});
  EXPECT_TRUE(request->stream && request->stream_usage);
}

TEST(CompletionTest, WhatIsWrongOrNotDone_IsRefusedByName) {
  const struct {
    const char* body;
    const char* named;
  } cases[] = {
      {"", "JSON"},
      {"[]", "JSON"},
      {R"({"prompt": 5})", "prompt"},
      {R"({})", "prompt"},
      {R"({"prompt": "x", "max_tokens": 0})", "max_tokens=0"},
      {R"({"prompt": "x", "max_tokens": 1e3})", "max_tokens"},
      {R"({"prompt": "x", "temperature": -1})", "temperature=-1"},
      {R"({"prompt": "x", "temperature": "hot"})", "temperature"},
      {R"({"prompt": "x", "top_p": 0})", "top_p"},
      {R"({"prompt": "x", "n": 2})", "n=2"},
      {R"({"prompt": "x", "logprobs": 3})", "logprobs=3"},
      {R"({"prompt": "x", "presence_penalty": 0.5})", "presence_penalty"},
      {R"({"prompt": "x", "tools": [{}]})", "tools"},
      {R"({"prompt": "x", "stop": ""})", "stop"},
      {R"({"prompt": "x", "stop": [1]})", "stop"},
      {R"({"prompt": "x", "stream": 1})", "stream"},
      {R"({"prompt": "x", "model": 1})", "model"},
  };
  for (const auto& c : cases) {
    const auto request = ParseCompletion(false, c.body);
    EXPECT_EQ(request.status().code(), absl::StatusCode::kInvalidArgument) << c.body;
    EXPECT_THAT(std::string(request.status().message()), HasSubstr(c.named)) << c.body;
  }
  for (const char* messages : {"[]", "5", "[5]", R"([{"content": "x"}])", R"([{"role": "user"}])",
                               R"([{"role": "user", "content": [{"type": "image_url"}]}])",
                               R"([{"role": "assistant", "content": "x", "tool_calls": [1]}])"}) {
    EXPECT_FALSE(ParseCompletion(true, absl::StrCat(R"({"messages": )", messages, "}")).ok())
        << messages;
  }
}

TEST(CompletionTest, Answers_AreJsonOfTheirForm) {
  const CompletionHead head = {.chat = true, .id = "i", .created_unix_s = 5, .model = "m"};
  const json whole =
      json::parse(CompletionJson(head, "said \xff", "stop", {10, 8, 3}, {.rows_read = 5}));
  EXPECT_EQ(whole["object"], "chat.completion");
  EXPECT_EQ(whole["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(whole["usage"]["total_tokens"], 13);
  EXPECT_EQ(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 8);
  EXPECT_EQ(whole["carrel"]["rows_read"], 5);
  const std::string event = TextEvent(head, "a\nb");
  EXPECT_EQ(event.substr(0, 6), "data: ");
  EXPECT_EQ(event.substr(event.size() - 2), "\n\n");
  EXPECT_EQ(event.find('\n'), event.size() - 2);  // one line
  EXPECT_EQ(json::parse(event.substr(6))["choices"][0]["delta"]["content"], "a\nb");
  const HttpError error = ErrorOf(absl::ResourceExhaustedError("later"));
  EXPECT_EQ(error.status, 429);
  EXPECT_EQ(json::parse(error.body)["error"]["message"], "later");
}

TEST(StopFilterTest, GivesWhatStandsBeforeTheStop_HoweverItComes) {
  std::mt19937 random(testing::UnitTest::GetInstance()->random_seed());
  for (int trial = 0; trial < 2000; ++trial) {
    std::string text;
    for (int i = 0; i < 30; ++i) text += "abc"[random() % 3];
    std::vector<std::string> stops;
    for (unsigned i = 0; i < random() % 3; ++i)
      stops.push_back(text.substr(random() % 25, 1 + random() % 4));
    // Of the stop that is whole first; of two, the one that begins first.
    size_t first = std::string::npos, end = std::string::npos;
    for (const std::string& stop : stops) {
      const size_t at = text.find(stop);
      if (at == std::string::npos) continue;
      const size_t its_end = at + stop.size();
      if (its_end < end || (its_end == end && at < first)) first = at, end = its_end;
    }
    StopFilter filter(stops);
    std::string said;
    for (size_t at = 0; at < text.size() && !filter.stopped();) {
      const size_t n = 1 + random() % 5;
      said += filter.Push(text.substr(at, n));
      EXPECT_EQ(text.substr(0, said.size()), said);
      at += n;
    }
    said += filter.Finish();
    EXPECT_EQ(said, text.substr(0, first)) << "stops of " << text;
    EXPECT_EQ(filter.stopped(), first != std::string::npos);
  }
}

}  // namespace
}  // namespace carrel::http_api
