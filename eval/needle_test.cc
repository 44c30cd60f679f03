#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "common/test_util.h"
#include "eval/needle_document.h"
#include "eval/needle_map.h"
#include "eval/questions.h"

namespace carrel::eval {
namespace {

// Words stand for tokens.
absl::StatusOr<int64_t> Words(absl::string_view text) {
  const std::vector<absl::string_view> words = absl::StrSplit(text, ' ', absl::SkipEmpty());
  return static_cast<int64_t>(words.size());
}

NeedleConfig Config(int64_t tokens) {
  return {.tokens = tokens,
          .depths = {0, 0.5, 1},
          .kinds = {NeedleKind::kSingle, NeedleKind::kMultiValue, NeedleKind::kTwoHop},
          .per_depth = 3,
          .others = 10,
          .seed = TestSeed()};
}

TEST(NeedleDocumentTest, IsAsLongAsAsked_AndTheSameSeedGivesTheSame) {
  for (const int64_t tokens : {4000, 9000}) {
    const NeedleConfig config = Config(tokens);
    const auto document = MakeNeedleDocument(config, Words);
    CARREL_ASSERT_OK(document);
    EXPECT_EQ(document->tokens, *Words(document->text));
    EXPECT_GE(document->tokens, tokens);
    EXPECT_LE(document->tokens, tokens + 40);
    EXPECT_EQ(document->questions.size(), 27u);
    EXPECT_EQ(document->text[0], ' ');
    EXPECT_EQ(MakeNeedleDocument(config, Words)->text, document->text);
    NeedleConfig other = config;
    ++other.seed;
    EXPECT_NE(MakeNeedleDocument(other, Words)->text, document->text);
  }
}

// Every answer can be read in the document, what was asked for by depth near that depth.
TEST(NeedleDocumentTest, AnswersAreInTheDocument_AtTheirDepth) {
  const auto document = MakeNeedleDocument(Config(20000), Words);
  CARREL_ASSERT_OK(document);
  const auto length = static_cast<double>(document->text.size());
  for (const NeedleQuestion& question : document->questions) {
    ASSERT_TRUE(absl::StartsWith(question.prompt, "\n\nQuestion: ")) << question.prompt;
    ASSERT_TRUE(absl::EndsWith(question.prompt, "\nAnswer:"));
    size_t last = 0, first = document->text.size();
    double nearest = 1;
    for (absl::string_view part : absl::StrSplit(question.answer, ", ")) {
      const size_t at = document->text.find(std::string(part));
      ASSERT_NE(at, std::string::npos) << part;
      if (question.kind == NeedleKind::kMultiValue) {
        EXPECT_GE(at, last) << "values in the order of the document";
        EXPECT_EQ(document->text.find(std::string(part), at + 1), std::string::npos);
      }
      last = at;
      first = std::min(first, at);
      nearest = std::min(nearest, std::abs(static_cast<double>(at) / length - question.depth));
    }
    // Facts of one depth follow each other, so the last stands a little later.
    if (question.kind != NeedleKind::kTwoHop) {
      EXPECT_LT(nearest, 0.1) << question.prompt;
    }
  }
}

TEST(NeedleDocumentTest, WhatDoesNotFit_IsRefused) {
  EXPECT_THAT(MakeNeedleDocument(Config(300), Words).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "ask for fewer facts"));
  NeedleConfig config = Config(4000);
  config.depths = {0.5, 1.5};
  EXPECT_THAT(ValidateNeedleConfig(config),
              StatusIs(absl::StatusCode::kInvalidArgument, "depth=1.5"));
  config.depths = {0.5, 0.5};
  EXPECT_THAT(ValidateNeedleConfig(config), StatusIs(absl::StatusCode::kInvalidArgument, "twice"));
  config = Config(63);
  EXPECT_THAT(ValidateNeedleConfig(config),
              StatusIs(absl::StatusCode::kInvalidArgument, "tokens=63"));
  config = Config(4000);
  config.per_depth = 0;
  EXPECT_THAT(ValidateNeedleConfig(config),
              StatusIs(absl::StatusCode::kInvalidArgument, "per_depth=0"));
  EXPECT_THAT(ParseNeedleKind("triple").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "kind=triple"));
}

TEST(NeedleMapTest, CountsByKindDepthAndLength) {
  NeedleMap map;
  Question question;
  map.Add(question, true);
  EXPECT_TRUE(map.empty());
  question.needle = NeedlePlace{"single", 0.5, 1000};
  map.Add(question, true);
  map.Add(question, false);
  question.needle->length = 2000;
  question.needle->depth = 0;
  map.Add(question, true);
  EXPECT_EQ(map.Table(),
            "\n| single: depth | 1000 tokens | 2000 tokens |\n|---:|---:|---:|\n"
            "| 0 | - | 1/1 |\n| 0.5 | 1/2 | - |\n");
}

}  // namespace
}  // namespace carrel::eval
