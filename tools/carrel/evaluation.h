// What:   a file of questions asked of one context, several at a time: how many answers are right, and how much of what
//         is right they have, how many equal those of dense attention, and how long it took.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "eval/needle_map.h"
#include "eval/questions.h"
#include "eval/source_tally.h"
#include "tools/carrel/retrieval_flags.h"

namespace carrel::tools {

// When the answer to a question with one text is right: it is that text, or holds it; but for white space at
// its ends.
enum class Match : uint8_t { kExact = 0, kContains = 1 };
absl::StatusOr<Match> ParseMatch(absl::string_view name);  // "exact", "contains"
absl::string_view MatchName(Match match);

// From 0 to 1 (answer_score.h); 0 or 1 where the question has one text.
double Score(const eval::Question& question, Match match, absl::string_view text);

struct Tally {
  bool keep = false;    // every answer
  bool digest = false;  // and of its logits the SHA-256
  int64_t exact = 0, right = 0, with_dense = 0, agreeing = 0, prompt_tokens = 0, tokens = 0;
  int64_t steps = 0;  // tokens fed back: what generate_seconds are of
  double score = 0;   // sum over questions; right are those of 1
  double prompt_seconds = 0, generate_seconds = 0;
  struct Answer {
    std::string prompt, text, answer;
    std::vector<TokenId> ids;
    double score = 0;
    std::string
        logits_sha256;  // of every prompt and generated position's, fp32; empty: not asked for
  };
  std::vector<Answer> answers;    // all, where `keep` says so
  std::vector<double> scores;     // of each question
  std::vector<Answer> differing;  // from dense where that is known, else not wholly right
  eval::NeedleMap needles;
  eval::SourceTally sources;
};

// Of an engine that has the flags' context open, so many questions at a time: each is answered as if it were alone;
// with several, seconds are of answers beside others.
// sources: passages to find of each answer; 0: none.
// before(i, tally) is called before question i, with what is counted by then. Errors name the question.
absl::Status AskAll(const RetrievalFlags& flags, serving::Engine& engine,
                    const serving::OpenedContext& context, int64_t together, Match match,
                    int64_t sources, absl::Span<const eval::Question> questions,
                    const std::function<void(size_t, const Tally&)>& before, Tally& tally);

}  // namespace carrel::tools
