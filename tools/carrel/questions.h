// What:   questions about a document: one JSON object a line with prompt (text that follows the
// document), answer, and maybe dense_ids (what dense attention
//         generates, EOS excluded).
// Errors: InvalidArgument a line that is something else (names file and line), or no line at all.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"

namespace carrel::tools {

struct Question {
  std::string prompt;
  std::string answer;
  bool has_dense_ids = false;
  std::vector<TokenId> dense_ids;
};

absl::StatusOr<std::vector<Question>> ReadQuestions(const std::string& path);

}  // namespace carrel::tools
