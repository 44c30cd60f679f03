#include "http_api/request_fields.h"

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/test_folders.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "http_api/api_error.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

absl::Status Check(const std::string& object, std::vector<std::string>* ignored = nullptr,
                   RequestKind kind = RequestKind::kChat) {
  std::vector<std::string> own;
  return CheckFields(kind, json::parse(object), "", ignored == nullptr ? own : *ignored);
}

// The table as docs/api-fields.md has it.
std::string FieldsMarkdown() {
  std::string table = "| field | of | taken | what |\n|---|---|---|---|\n";
  for (const FieldRule& rule : FieldRules()) {
    const std::string taken = rule.kind == FieldRule::kRead       ? "read"
                              : rule.kind == FieldRule::kHarmless ? "anything: it changes no answer"
                              : absl::string_view(rule.neutral) == "[]"
                                  ? "only null"
                                  : absl::StrCat("only null and what is in `", rule.neutral, "`");
    absl::StrAppend(&table, "| `", rule.name, "` | ",
                    absl::string_view(rule.where) == "chat prompt" ? "both" : rule.where, " | ",
                    taken, " | ", rule.words, " |\n");
  }
  return table;
}

TEST(RequestFieldsTest, TheTableIsThatOfTheDocs) {
  const auto docs = ReadFile(SourceFolder() + "/docs/api-fields.md");
  ASSERT_TRUE(docs.ok()) << docs.status();
  EXPECT_TRUE(absl::StrContains(*docs, FieldsMarkdown())) << "docs/api-fields.md is to hold:\n"
                                                          << FieldsMarkdown();
}

TEST(RequestFieldsTest, EachRule_HoldsForEachKindOfValue) {
  for (const FieldRule& rule : FieldRules()) {
    for (const RequestKind kind :
         {RequestKind::kChat, RequestKind::kPrompt, RequestKind::kMessage}) {
      const char* const where = kind == RequestKind::kChat     ? "chat"
                                : kind == RequestKind::kPrompt ? "prompt"
                                                               : "message";
      if (!absl::StrContains(rule.where, where)) continue;
      const auto check = [&](const json& value) {
        std::vector<std::string> ignored;
        const absl::Status status = CheckFields(kind, json{{rule.name, value}}, "", ignored);
        EXPECT_THAT(ignored, IsEmpty()) << rule.name;
        return status;
      };
      EXPECT_TRUE(check(nullptr).ok()) << rule.name;
      if (rule.kind == FieldRule::kNeutral) {
        for (const json& taken : json::parse(rule.neutral))
          EXPECT_TRUE(check(taken).ok()) << rule.name;
        const absl::Status refused = check("something else");
        EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << rule.name;
        EXPECT_EQ(ParamOf(refused), rule.name);
      } else {
        EXPECT_TRUE(check("something else").ok()) << rule.name;
      }
    }
  }
}

TEST(RequestFieldsTest, WhatIsNearlyAFieldOfOurs_IsRefusedWithIt) {
  const struct {
    const char* given;
    const char* meant;
  } cases[] = {{"context_name", "context"},
               {"contexts", "context"},
               {"contextName", "context"},
               {"Context", "context"},
               {"carrel_context", "context"},
               {"contxet", "context"},
               {"maxTokens", "max_tokens"},
               {"max-tokens", "max_tokens"},
               {"max_token", "max_tokens"},
               {"temprature", "temperature"},
               {"topP", "top_p"},
               {"topK", "top_k"},
               {"sead", "seed"},
               {"chat_template_kwarg", "chat_template_kwargs"},
               {"Stream", "stream"},
               {"source", "sources"},
               {"stops", "stop"},
               {"model_name", "model"}};
  for (const auto& c : cases) {
    const absl::Status status = Check(absl::StrCat("{\"", c.given, "\": \"x\"}"));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.given;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("did you mean ", c.meant, "?")))
        << c.given;
  }
}

TEST(RequestFieldsTest, WhatNobodyKnows_IsNamed_UnlessItSaysNothing) {
  std::vector<std::string> ignored;
  EXPECT_TRUE(Check(R"({"x_trace": 5, "watermark": true, "zero": null, "no": false, "empty": [],
                        "nothing": {}, "blank": "", "user": "me", "metadata": {"a": [1]}})",
                    &ignored)
                  .ok());
  EXPECT_THAT(ignored, ElementsAre("watermark", "x_trace"));
  // However many there are, and however long their names.
  json many = json::object();
  for (int i = 0; i < 1000; ++i) many[absl::StrCat("unheard_of_", i, std::string(1000, 'x'))] = 1;
  ignored.clear();
  EXPECT_TRUE(CheckFields(RequestKind::kChat, many, "", ignored).ok());
  EXPECT_LE(ignored.size(), 100u);
  for (const std::string& name : ignored) EXPECT_LE(name.size(), 100u);
}

}  // namespace
}  // namespace carrel::http_api
