// Files that commands read: token ids, questions.
#include <string>
#include <vector>

#include "tests/fuzz/target.h"
#include "tools/carrel/questions.h"
#include "tools/carrel/token_file.h"

namespace carrel::fuzz {
namespace {

// What an error says is shown to a person.
constexpr size_t kLongestMessage = 4096;

void CheckMessage(const absl::Status& status) {
  CARREL_FUZZ_CHECK(status.message().size() <= kLongestMessage);
}

void RunTokens(absl::string_view bytes) {
  CheckMessage(tools::ReadTokenFile(WriteInput("tokens.json", bytes)).status());
}
std::vector<std::string> TokensSeeds() { return {"[1, 2, 70000]", "[]"}; }
CARREL_FUZZ_TARGET(tokens, RunTokens, TokensSeeds);

void RunQuestions(absl::string_view bytes) {
  CheckMessage(tools::ReadQuestions(WriteInput("questions.jsonl", bytes)).status());
}
std::vector<std::string> QuestionsSeeds() {
  return {R"({"prompt": "a?", "answer": "b", "dense_ids": [1, 2]}
{"prompt": "c?", "answer": "d", "kind": "single", "depth": 0.5, "length": 8000}
)"};
}
CARREL_FUZZ_TARGET(questions, RunQuestions, QuestionsSeeds);

}  // namespace
}  // namespace carrel::fuzz
