// Files that commands read: token ids, questions; and answers that are scored.
#include <string>
#include <vector>

#include "eval/answer_score.h"
#include "eval/questions.h"
#include "tests/fuzz/target.h"
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
  CheckMessage(eval::ReadQuestions(WriteInput("questions.jsonl", bytes)).status());
}
std::vector<std::string> QuestionsSeeds() {
  return {R"({"prompt": "a?", "answer": "b", "dense_ids": [1, 2]}
{"prompt": "c?", "answer": "d", "kind": "single", "depth": 0.5, "length": 8000}
{"prompt": "e?", "answers": ["f", "g"]}
{"prompt": "h?", "records": [{"name": "Ada", "room": 7}]}
)"};
}
CARREL_FUZZ_TARGET(questions, RunQuestions, QuestionsSeeds);

// What a model answers; records within it count once, and are found again in what they are written as.
void RunRecords(absl::string_view bytes) {
  const eval::RecordSet records = eval::RecordsIn(bytes);
  std::string again;
  for (const std::string& record : records) again += record + ",";
  CARREL_FUZZ_CHECK(eval::RecordsIn(again).size() <= records.size());
  CARREL_FUZZ_CHECK(eval::RecordOverlap(records, records) == 1);
}
std::vector<std::string> RecordsSeeds() {
  return {
      R"(Here: [{"name": "Ada", "room": 7}, {"name": "L\"eo", "room": "12"}] {"a": {"b": [1, {}]}} {"cut)"};
}
CARREL_FUZZ_TARGET(records, RunRecords, RecordsSeeds);

}  // namespace
}  // namespace carrel::fuzz
