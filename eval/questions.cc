#include "eval/questions.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/file.h"
#include "common/json.h"
#include "common/status.h"

namespace carrel::eval {

namespace {

// Whether an object tells where a needle stands; some of it is not enough.
absl::StatusOr<std::optional<NeedlePlace>> ReadPlace(const nlohmann::json& json) {
  if (!json.contains("kind") && !json.contains("depth") && !json.contains("length"))
    return std::optional<NeedlePlace>();
  const bool valid = json.contains("kind") && json["kind"].is_string() && json.contains("depth") &&
                     json["depth"].is_number() && json.contains("length") &&
                     json["length"].is_number_integer();
  if (!valid) {
    return absl::InvalidArgumentError(
        "a needle's place is a string kind, a number depth and an integer length");
  }
  return NeedlePlace{json["kind"].get<std::string>(), json["depth"].get<double>(),
                     json["length"].get<int64_t>()};
}

// What is right: one of three fields, and what of it the prompt says.
absl::Status ReadAnswer(const nlohmann::json& json, Question& question) {
  const bool text = json.contains("answer"), pieces = json.contains("answers"),
             records = json.contains("records");
  if (text + pieces + records != 1)
    return absl::InvalidArgumentError("what is right is one of answer, answers and records");
  if (json.contains("begun")) {
    if (!json["begun"].is_string() || text)
      return absl::InvalidArgumentError("begun is a string beside answers or records");
    question.begun = json["begun"].get<std::string>();
  }
  if (text) {
    if (!json["answer"].is_string()) return absl::InvalidArgumentError("answer is no string");
    question.answer = json["answer"].get<std::string>();
  } else if (pieces) {
    const nlohmann::json& given = json["answers"];
    const bool valid =
        given.is_array() && !given.empty() &&
        std::all_of(given.begin(), given.end(), [](const nlohmann::json& piece) {
          return piece.is_string() && !absl::StripAsciiWhitespace(piece.get<std::string>()).empty();
        });
    if (!valid) return absl::InvalidArgumentError("answers are no array of texts, at least one");
    question.pieces = given.get<std::vector<std::string>>();
    question.answer = absl::StrJoin(question.pieces, ", ");
  } else {
    const nlohmann::json& given = json["records"];
    const bool valid =
        given.is_array() && !given.empty() &&
        std::all_of(given.begin(), given.end(), [](const auto& one) { return one.is_object(); });
    if (valid) question.records = RecordsOf(given);
    if (question.records.empty())
      return absl::InvalidArgumentError("records are no array of objects, at least one");
    question.answer = DumpJson(given);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<Question>> ReadQuestions(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  std::vector<Question> questions;
  int line_number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++line_number;
    if (absl::StripAsciiWhitespace(line).empty()) continue;
    ASSIGN_OR_RETURN(const nlohmann::json json,
                     ParseJson(line, absl::StrCat(path, ":", line_number)));
    const bool valid = json.is_object() && json.contains("prompt") && json["prompt"].is_string() &&
                       (!json.contains("dense_ids") ||
                        (json["dense_ids"].is_array() &&
                         std::all_of(json["dense_ids"].begin(), json["dense_ids"].end(),
                                     [](const auto& id) { return id.is_number_integer(); })));
    if (!valid) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ":", line_number, ": not an object with a string prompt (and integers dense_ids)"));
    }
    Question question;
    question.prompt = json["prompt"].get<std::string>();
    RETURN_IF_ERROR(Annotate(ReadAnswer(json, question), absl::StrCat(path, ":", line_number)));
    question.has_dense_ids = json.contains("dense_ids");
    if (question.has_dense_ids) question.dense_ids = json["dense_ids"].get<std::vector<TokenId>>();
    absl::StatusOr<std::optional<NeedlePlace>> place = ReadPlace(json);
    if (!place.ok()) return Annotate(place.status(), absl::StrCat(path, ":", line_number));
    question.needle = *std::move(place);
    questions.push_back(std::move(question));
  }
  if (questions.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": no questions"));
  return questions;
}

}  // namespace carrel::eval
