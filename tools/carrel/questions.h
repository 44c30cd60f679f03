// What:   questions about a document: one JSON object a line with prompt (text that follows the
//         document), answer, and maybe dense_ids (what dense attention generates, EOS excluded) and
//         where the fact stands: kind, depth and length, all three.
// Errors: InvalidArgument a line that is something else (names file and line), or no line at all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"

namespace carrel::tools {

// Of a question that carrel needle wrote.
struct NeedlePlace {
  std::string kind;
  double depth = 0;    // 0: the beginning of the document, 1: the end
  int64_t length = 0;  // tokens of the document, as it was asked for
};

struct Question {
  std::string prompt;
  std::string answer;
  bool has_dense_ids = false;
  std::vector<TokenId> dense_ids;
  std::optional<NeedlePlace> needle;
};

absl::StatusOr<std::vector<Question>> ReadQuestions(const std::string& path);

}  // namespace carrel::tools
