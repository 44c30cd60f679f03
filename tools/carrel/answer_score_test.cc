#include "eval/answer_score.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "common/test_util.h"
#include "eval/questions.h"
#include "tools/carrel/evaluation.h"

namespace carrel::tools {
namespace {

TEST(PiecesTest, APieceStandsAlone_InAnyCase) {
  EXPECT_TRUE(eval::HasPiece("It is 4711.", "4711"));
  EXPECT_TRUE(eval::HasPiece("4711", " 4711 "));
  EXPECT_TRUE(eval::HasPiece("said \"Tarub\", then", "TARUB"));
  EXPECT_TRUE(eval::HasPiece("47110 and 4711", "4711"));  // the first is another number
  EXPECT_TRUE(
      eval::HasPiece("\xc3\xa9"
                     "art\xc3\xa9",
                     "art"));
  EXPECT_FALSE(eval::HasPiece("It is 47112.", "4711"));
  EXPECT_FALSE(eval::HasPiece("an article", "art"));
  EXPECT_FALSE(eval::HasPiece("", "art"));
}

TEST(PiecesTest, ScoreIsTheShareFound) {
  const std::vector<std::string> pieces = {"12", "34", "56", "78"};
  EXPECT_EQ(eval::PiecesFound("56, 12 and 99", pieces), 0.5);
  EXPECT_EQ(eval::PiecesFound("12 12 12", pieces), 0.25);
  EXPECT_EQ(eval::PiecesFound("78, 56, 34, 12", pieces), 1);
  EXPECT_EQ(eval::PiecesFound("none", pieces), 0);
}

TEST(RecordsTest, AreFoundWhereverTheyStand) {
  const eval::RecordSet two =
      eval::RecordsIn(R"([{"name": "Ada", "room": 7}, {"name": "Leo", "room": 12}])");
  EXPECT_EQ(two.size(), 2u);
  for (const char* text : {
           R"(Here: {"room":12,"name":"Leo"} and {"Name": " ADA ", "room": "7"}.)",
           "```json\n{\"rooms\": [\n {\"name\": \"Ada\", \"room\": 7.0},\n {\"name\": \"Leo\", "
           "\"room\": 12}]}\n```",
           R"(It "is { {"name": "Ada", "room": 7}, {"name": "Leo", "room": 12}, {"name": "Ma)",
           R"({"name": "Ada", "room": 7} {"name": "Leo", "room": 12} {"name": Eve} {})",
       }) {
    EXPECT_EQ(eval::RecordsIn(text), two) << text;
  }
  EXPECT_EQ(eval::RecordsIn(R"({"a": "}{\"}"})").size(), 1u);
  EXPECT_TRUE(eval::RecordsIn("").empty());
  EXPECT_TRUE(eval::RecordsIn(R"(["Ada", 7] "{)").empty());
  EXPECT_TRUE(eval::RecordsIn(std::string(10000, '{') + "\"").empty());
}

TEST(RecordsTest, OverlapIsIntersectionOverUnion) {
  const eval::RecordSet right = eval::RecordsOf(nlohmann::json::parse(
      R"([{"name": "Ada", "room": 7}, {"name": "Leo", "room": 12}, {"name": "Eve", "room": 3}])"));
  ASSERT_EQ(right.size(), 3u);
  const auto score = [&](const char* text) {
    return eval::RecordOverlap(eval::RecordsIn(text), right);
  };
  EXPECT_EQ(score(R"([{"name":"Eve","room":3},{"name":"Leo","room":12},{"name":"Ada","room":7}])"),
            1);
  EXPECT_EQ(score(R"([{"name":"Eve","room":3},{"name":"Leo","room":13}])"), 0.25);
  EXPECT_EQ(score(R"([{"name":"Eve","room":3},{"name":"Eve","room":3}])"), 1.0 / 3);
  EXPECT_EQ(score("nobody"), 0);
  EXPECT_EQ(eval::RecordOverlap({}, {}), 1);
}

absl::StatusOr<std::vector<eval::Question>> Read(const std::string& text) {
  const std::string path = FreshTempDir() + "/questions.jsonl";
  std::ofstream(path) << text;
  return eval::ReadQuestions(path);
}

TEST(QuestionsTest, OneOfAnswerAnswersRecords_IsRead) {
  const auto questions = Read(R"({"prompt": "a?", "answer": "b"}
{"prompt": "c?", "answers": ["d", "e"], "family": "of no use here"}
{"prompt": "f?", "records": [{"name": "Ada", "room": 7}]}
{"prompt": "g? [{\"name\":", "begun": "[{\"name\":", "records": [{"name": "Ada", "room": 7}]}
)");
  CARREL_ASSERT_OK(questions);
  ASSERT_EQ(questions->size(), 4u);
  EXPECT_EQ(Score((*questions)[3], Match::kExact, R"( "Ada", "room": 7}])"), 1);
  EXPECT_EQ(Score((*questions)[0], Match::kExact, " b "), 1);
  EXPECT_EQ(Score((*questions)[0], Match::kExact, "a b"), 0);
  EXPECT_EQ(Score((*questions)[0], Match::kContains, "a b"), 1);
  EXPECT_EQ((*questions)[1].answer, "d, e");
  for (const Match match : {Match::kExact, Match::kContains}) {
    EXPECT_EQ(Score((*questions)[1], match, "it is E"), 0.5);
    EXPECT_EQ(Score((*questions)[2], match, R"([{"room": 7, "name": "ada"}, {"a": 1}])"), 0.5);
  }
}

TEST(QuestionsTest, WhatIsNoneOfThem_IsRefused_WithItsLine) {
  for (const char* text : {
           R"({"prompt": "a?"})",
           R"({"prompt": "a?", "answer": 7})",
           R"({"prompt": "a?", "answer": "b", "answers": ["b"]})",
           R"({"prompt": "a?", "answer": "b", "begun": "c"})",
           R"({"prompt": "a?", "answers": ["b"], "begun": 7})",
           R"({"prompt": "a?", "answers": []})",
           R"({"prompt": "a?", "answers": [" "]})",
           R"({"prompt": "a?", "answers": ["b", 7]})",
           R"({"prompt": "a?", "records": []})",
           R"({"prompt": "a?", "records": ["b"]})",
           R"({"prompt": "a?", "records": {"name": "Ada"}})",
       }) {
    EXPECT_THAT(Read(text).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, "questions.jsonl:1: "))
        << text;
  }
}

}  // namespace
}  // namespace carrel::tools
