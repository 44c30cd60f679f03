// What:   questions about a document: one JSON object a line with prompt (text that follows the
//         document) and what is right: answer, a text; or answers, several pieces of text; or records, an
//         array of objects (answer_score.h). Maybe begun, an answer's beginning that the prompt ends with, which
//         counts as part of it; dense_ids (what dense attention generates, EOS
//         excluded) and where the fact stands: kind, depth and length, all three.
// Errors: InvalidArgument a line that is something else (names file and line), or no line at all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "eval/answer_score.h"

namespace carrel::eval {

// Of a question that carrel needle wrote.
struct NeedlePlace {
  std::string kind;
  double depth = 0;    // 0: the beginning of the document, 1: the end
  int64_t length = 0;  // tokens of the document, as it was asked for
};

struct Question {
  std::string prompt;
  std::string answer;               // of answers: joined by ", "; of records: as JSON
  std::vector<std::string> pieces;  // answers; else none
  RecordSet records;                // else none
  std::string begun;                // what of the answer is in the prompt already
  bool has_dense_ids = false;
  std::vector<TokenId> dense_ids;
  std::optional<NeedlePlace> needle;

  // Whether an answer may be right in part.
  bool HasParts() const { return !pieces.empty() || !records.empty(); }
};

absl::StatusOr<std::vector<Question>> ReadQuestions(const std::string& path);

}  // namespace carrel::eval
