#include "http_api/completion.h"

#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "absl/strings/str_cat.h"
#include "common/test_random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "http_api/request_fields.h"

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
  EXPECT_EQ(request->sampling.temperature, 0);
  EXPECT_EQ(request->sampling.top_p, 0.5);
  EXPECT_EQ(request->sampling.seed, static_cast<uint64_t>(-3));
  EXPECT_FALSE(request->sampling.top_k.has_value());
  EXPECT_EQ(request->stop, std::vector<std::string>{"x"});
  EXPECT_TRUE(request->stream && request->stream_usage);
}

// As clients of other servers and other languages write them.
TEST(CompletionTest, NeutralValuesAndOtherWaysOfWriting_AreTaken) {
  for (const char* field : {R"("suffix": "")",
                            R"("tool_choice": "auto")",
                            R"("tool_choice": "none")",
                            R"("max_tokens": 8.0)",
                            R"("max_tokens": -1)",
                            R"("max_tokens": null)",
                            R"("seed": 1.0)",
                            R"("n": 1.0)",
                            R"("logprobs": false)",
                            R"("response_format": {"type": "text"})",
                            R"("response_format": null)",
                            R"("stop": "")",
                            R"("stop": [])",
                            R"("stop": [""])",
                            R"("logit_bias": {})",
                            R"("tools": [])",
                            R"("frequency_penalty": 0.0)",
                            R"("top_k": -1)",
                            R"("top_k": 40)",
                            R"("min_p": 0.1)",
                            R"("repeat_penalty": 1.1)",
                            R"("user": {"a": [1]})",
                            R"("store": true)",
                            R"("model": "")",
                            R"("model": "m")",
                            R"("context": null)",
                            R"("context": "")",
                            R"("model": "m@a", "context": "a")",
                            R"("echo": false)"}) {
    const std::string body = absl::StrCat(R"({"prompt": "x", )", field, "}");
    const auto request = ParseCompletion(false, body);
    EXPECT_TRUE(request.ok()) << field << ": " << request.status();
    EXPECT_TRUE(!request.ok() || request->ignored.empty()) << field;
  }
  EXPECT_EQ(ParseCompletion(false, R"({"prompt": ["one"]})")->prompt, "one");
  EXPECT_EQ(ParseCompletion(false, "\xef\xbb\xbf{\"prompt\": \"x\"}")->prompt, "x");
  EXPECT_EQ(ParseCompletion(false, R"({"prompt": "x", "max_tokens": 8.0})")->max_tokens, 8);
  EXPECT_EQ(ParseCompletion(false, R"({"prompt": "x", "max_tokens": -1})")->max_tokens,
            CompletionRequest::kMaxTokens);
  const auto sampled = ParseCompletion(
      false, R"({"prompt": "x", "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5})");
  ASSERT_TRUE(sampled.ok());
  EXPECT_EQ(sampled->sampling.top_k, 7);
  EXPECT_EQ(sampled->sampling.min_p, 0.25);
  EXPECT_EQ(sampled->sampling.repetition_penalty, 1.5);
}

TEST(CompletionTest, Messages_OfRealClients_AreTaken) {
  for (const char* message :
       {R"({"role": "user", "content": [{"type": null, "text": "x"}]})",
        R"({"role": "user", "content": [{"text": "x"}, "y"]})",
        R"({"role": "assistant", "content": "x", "tool_calls": [], "function_call": null,
            "refusal": null, "annotations": [], "audio": null})",
        R"({"role": "assistant", "content": null})", R"({"role": "assistant"})",
        R"({"role": "developer", "content": "x"})"}) {
    const auto request = ParseCompletion(true, absl::StrCat(R"({"messages": [)", message, "]}"));
    EXPECT_TRUE(request.ok()) << message << ": " << request.status();
    EXPECT_TRUE(!request.ok() || request->ignored.empty()) << message;
  }
  const auto named = ParseCompletion(
      true, R"({"messages": [{"role": "user", "content": "x", "name": "me"}], "x_y": 1})");
  ASSERT_TRUE(named.ok());
  EXPECT_THAT(named->ignored, testing::UnorderedElementsAre("messages.name", "x_y"));
  const auto streamed = ParseCompletion(false, R"({"prompt": "x", "stream": true, "stream_options":
          {"includeUsage": true, "include_usage": true, "continuous_usage_stats": false}})");
  ASSERT_TRUE(streamed.ok()) << streamed.status();
  EXPECT_THAT(streamed->ignored, testing::ElementsAre("stream_options.includeUsage"));
}

TEST(CompletionTest, FieldsOfTheTemplate_AreRead) {
  const auto request = ParseCompletion(true, R"({"messages": [{"role": "user", "content": "x"}],
      "chat_template_kwargs": {"enable_thinking": false, "a": [1]}, "reasoning_effort": "low",
      "continue_final_message": true, "add_generation_prompt": false})");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(json::parse(request->chat.arguments),
            (json{{"enable_thinking", false}, {"a", {1}}, {"reasoning_effort", "low"}}));
  EXPECT_TRUE(request->chat.continue_last);
  EXPECT_FALSE(request->chat.begin_answer);
  EXPECT_EQ(request->template_fields.size(), 3u);
}

// Whatever stands in whichever field, at whatever depth, it is a status.
const struct {
  const char* field;  // also the error's param
  const char* value;
  const char* words;
} kRefused[] = {
    {"prompt", "5", "prompt=5"},
    {"prompt", "[1, 2]", "token ids"},
    {"prompt", R"(["a", "b"])", "list of one"},
    {"max_tokens", "0", "max_tokens=0"},
    {"max_tokens", "8.5", "max_tokens=8.5"},
    {"max_tokens", "1e30", "max_tokens=1e+30"},
    {"max_tokens", "-2", "max_tokens=-2"},
    {"max_tokens", "\"8\"", "whole number"},
    {"seed", "9223372036854775808", "seed=9223372036854775808"},
    {"temperature", "-1", "temperature=-1"},
    {"temperature", "\"hot\"", "[0, 2]"},
    {"temperature", "1e999", "byte"},
    {"top_p", "0", "above 0"},
    {"min_p", "2", "[0, 1]"},
    {"n", "2", "n=2"},
    {"logprobs", "3", "logprobs=3"},
    {"logprobs", "0", "logprobs=0"},
    {"presence_penalty", "0.5", "repetition_penalty"},
    {"tools", "[{}]", "tools"},
    {"tool_choice", "\"required\"", "tools are not supported"},
    {"response_format", R"({"type": null})", "response_format"},
    {"response_format", R"({"type": ["text"]})", "response_format"},
    {"response_format", "\"json\"", "response_format"},
    {"guided_regex", "\"a+\"", "guided_regex"},
    {"ignore_eos", "true", "ignore_eos"},
    {"stop_token_ids", "[5]", "say stop"},
    {"context_name", "\"a\"", "did you mean context?"},
    {"maxTokens", "5", "did you mean max_tokens?"},
    {"stop", "[1]", "stop"},
    {"stop", "[null]", "stop"},
    {"stream", "1", "stream"},
    {"stream_options", "[]", "stream_options"},
    {"sources", "101", "[0, 100]"},
    {"wait", "601", "[0, 600]"},
    {"model", "1", "model"},
    {"model", "\"m@../x\"", "../x"},
    {"context", "\"a b\"", "a b"},
    {"context", "[\"a\"]", "context"},
};

TEST(CompletionTest, WhatIsWrongOrNotDone_IsRefusedByName) {
  for (const auto& c : kRefused) {
    const bool prompt = std::string(c.field) == "prompt";
    const auto request =
        ParseCompletion(false, absl::StrCat("{", prompt ? "" : "\"prompt\": \"x\", ", "\"", c.field,
                                            "\": ", c.value, "}"));
    EXPECT_EQ(request.status().code(), absl::StatusCode::kInvalidArgument) << c.field << c.value;
    EXPECT_THAT(std::string(request.status().message()), HasSubstr(c.words)) << c.field;
    EXPECT_EQ(ParamOf(request.status()), std::string(c.words) == "byte" ? "" : c.field);
  }
  for (const char* body :
       {"", "[]", "{}", "{'prompt': 'x'}", "{\"prompt\": \"x\",}", "{\"prompt\": NaN}",
        "{\"prompt\": \"\\ud83d\"}", "{\"prompt\": \"\xff\"}",
        R"({"prompt": "x", "context": "a", "context": "b"})",
        R"({"prompt": "x", "model": "m@a", "context": "b"})"}) {
    EXPECT_EQ(ParseCompletion(false, body).status().code(), absl::StatusCode::kInvalidArgument)
        << body;
  }
  for (const char* messages :
       {"[]", "5", "null", "[5]", R"([{"content": "x"}])", R"([{"role": "", "content": "x"}])",
        R"([{"role": 5, "content": "x"}])", R"([{"role": "user"}])",
        R"([{"role": "user", "content": 5}])",
        R"([{"role": "user", "content": [{"type": "image_url"}]}])",
        R"([{"role": "user", "content": [{"type": 1, "text": "x"}]}])",
        R"([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}])",
        R"([{"role": "user", "content": [{"type": "text", "text": 5}]}])",
        R"([{"role": "user", "content": [[]]}])",
        R"([{"role": "assistant", "content": "x", "tool_calls": [1]}])"}) {
    const auto request = ParseCompletion(true, absl::StrCat(R"({"messages": )", messages, "}"));
    EXPECT_EQ(request.status().code(), absl::StatusCode::kInvalidArgument) << messages;
    EXPECT_EQ(ParamOf(request.status()).substr(0, 8), "messages") << messages;
  }
}

TEST(CompletionTest, NestingAndLongNames_AreBounded) {
  for (const char* field : {"n", "prompt", "stop", "messages", "temperature", "response_format",
                            "content", "tools", "user", "chat_template_kwargs", "unheard_of"}) {
    for (const int depth : {63, 64, 1000, 200000}) {
      const std::string body =
          absl::StrCat("{\"prompt\": \"x\", \"messages\": [], \"", field,
                       "\": ", std::string(depth, '['), std::string(depth, ']'), "}");
      for (const bool chat : {false, true}) {
        const auto request = ParseCompletion(chat, body);
        if (request.ok()) continue;
        EXPECT_LT(request.status().message().size(), 1000u);
      }
      EXPECT_TRUE(depth < 64 || !ParseCompletion(false, body).ok()) << field << depth;
    }
  }
  const std::string long_name(20 << 20, 'm');
  for (const std::string& field : {std::string("model"), std::string("context")}) {
    const auto request = ParseCompletion(
        false, absl::StrCat(R"({"prompt": "x", ")", field, "\": \"@", long_name, "\"}"));
    EXPECT_EQ(request.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_LT(request.status().message().size(), 1000u);
    EXPECT_EQ(ParamOf(request.status()), field);
  }
  // What the answer would name again.
  json arguments = json::object();
  for (int i = 0; i < 101; ++i) arguments[absl::StrCat("name_", i)] = i;
  for (const json& many : {arguments, json{{std::string(101, 'n'), 1}}}) {
    const json body = {{"messages", {{{"role", "user"}, {"content", "x"}}}},
                       {"chat_template_kwargs", many}};
    EXPECT_EQ(ParamOf(ParseCompletion(true, body.dump()).status()), "chat_template_kwargs");
  }
  EXPECT_TRUE(ParseCompletion(false, absl::StrCat(R"({"prompt": "x", "model": ")",
                                                  std::string(256, 'm'), "\"}"))
                  .ok());
}

// 30 fields times random trees: each is answered.
TEST(CompletionTest, RandomTrees_AreReadOrRefused) {
  std::mt19937_64 random(TestSeed());
  std::vector<std::string> names = {"unheard", "content", "role", "type", "text", "include_usage"};
  for (const FieldRule& rule : FieldRules()) names.push_back(rule.name);
  const std::function<json(int)> tree = [&](int depth) -> json {
    switch (random() % (depth > 4 ? 8 : 10)) {
      case 0:
        return nullptr;
      case 1:
        return random() % 2 == 0;
      case 2:
        return static_cast<int64_t>(random()) >> (random() % 64);
      case 3:
        return random();
      case 4:
        return static_cast<double>(random()) / 3 - 1e18;
      case 5:
        return names[random() % names.size()];
      case 6:
        return "text";
      case 7:
        return std::string(random() % 300, static_cast<char>('a' + random() % 26));
      case 8: {
        json list = json::array();
        for (uint64_t i = random() % 4; i > 0; --i) list.push_back(tree(depth + 1));
        return list;
      }
      default: {
        json object = json::object();
        for (uint64_t i = random() % 5; i > 0; --i) {
          object[names[random() % names.size()]] = tree(depth + 1);
        }
        return object;
      }
    }
  };
  int taken = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    json body = {{"prompt", "x"}, {"messages", {{{"role", "user"}, {"content", "x"}}}}};
    for (uint64_t i = random() % 3; i > 0; --i) body[names[random() % names.size()]] = tree(0);
    const auto request = ParseCompletion(trial % 2 == 0, body.dump());
    taken += request.ok();
    if (request.ok()) continue;
    EXPECT_EQ(request.status().code(), absl::StatusCode::kInvalidArgument) << body;
    EXPECT_LT(request.status().message().size(), 1000u) << body;
  }
  EXPECT_GT(taken, 1000);
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
  Figures figures;
  figures.sampling = {.temperature = 0.5, .top_p = 0.25, .top_k = 3, .seed = 7};
  figures.advised = {"top_k"};
  figures.ignored = {"watermark"};
  figures.not_kept = "no room";
  const json told = json::parse(CompletionJson(head, "x", "stop", {}, figures))["carrel"];
  EXPECT_EQ(told["sampling"]["temperature"], 0.5);
  EXPECT_EQ(told["sampling"]["top_k"], 3);
  EXPECT_EQ(told["sampling"]["advised"], json::array({"top_k"}));
  EXPECT_EQ(told["ignored"], json::array({"watermark"}));
  EXPECT_EQ(told["kept"], false);
  EXPECT_EQ(told["not_kept"], "no room");
}

}  // namespace
}  // namespace carrel::http_api
