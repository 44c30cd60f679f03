// What:   the same questions under several configurations of retrieval, one after the other in one
//         run: quality and cost of each.
// Edge:   a configuration is a JSON object of the flags of `eval` without their dashes, which stand
//         over those of the command line: {"top-k": 64, "zone": "host", "method": "hip"}. "name" is
//         its label; without it the flags are.
// Errors: InvalidArgument a file that is no such list, a flag that eval does not have, what a flag
//         refuses: names the configuration.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "decoder/statistics.h"
#include "eval/questions.h"
#include "tools/carrel/evaluation.h"
#include "tools/carrel/retrieval_flags.h"

namespace carrel::tools {

struct Configuration {
  std::string name;
  std::string line;      // its flags without top-k: one curve's configurations share it
  RetrievalFlags flags;  // resolved
};

struct ComparedRun {
  Configuration configuration;
  Tally tally;
  double prompt_ms_per_token = 0;  // of prompt tokens
  double ms_per_token = 0;         // of generated tokens
  double rows_attended = 0;        // of the zone, per token, over layers and KV heads
  double keys_visited = 0;         // keys, codes or labels looked at to choose, the same way
  double bytes_moved = 0;          // per token: read here, or received from the store, whose own
                                   // reads are not known here
  // Of the questions that were measured, per layer; empty if none was.
  std::vector<double> output_error, attended_mass;
  double mean_output_error = 0, mean_attended_mass = 0;
  double promised_error = 0;
};

struct Comparison {
  std::string context;
  int64_t context_tokens = 0;
  int64_t questions = 0, measured_questions = 0;
  Match match = Match::kExact;
  std::vector<ComparedRun> runs;
};

// base: the flags of the command line, not yet resolved.
absl::StatusOr<std::vector<Configuration>> ReadConfigurations(const std::string& path,
                                                              const RetrievalFlags& base);

// measured: the first so many questions are asked once more, apart from what is timed, to hold
// every layer's attention against dense attention. together: questions at a time. A model is loaded once for
// configurations in a row that have it.
absl::StatusOr<Comparison> Compare(absl::Span<const Configuration> configurations,
                                   absl::Span<const eval::Question> questions, int64_t measured,
                                   Match match, int64_t together, bool keep_answers);

// As JSON, as a Markdown table, and as one self-contained page with curves. Without dense answers in the questions,
// agreement shows as "-" (null in JSON).
nlohmann::json AnswersJson(const std::vector<Tally::Answer>& answers);
// Of so many questions: what is right, and how much.
nlohmann::json TallyJson(const Tally& tally, int64_t asked);
nlohmann::json ComparisonJson(const Comparison& comparison);
std::string ComparisonMarkdown(const Comparison& comparison);
std::string ComparisonPage(const Comparison& comparison);

}  // namespace carrel::tools
