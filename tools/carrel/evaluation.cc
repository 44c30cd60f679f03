#include "tools/carrel/evaluation.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status.h"

namespace carrel::tools {
namespace {

absl::Status CountSources(OpenDecoder& open, const Question& question,
                          const std::vector<TokenId>& answer, int64_t most, SourceTally& tally) {
  const absl::Time start = absl::Now();
  ASSIGN_OR_RETURN(const std::vector<library::Source> sources, open.Sources(answer, most));
  tally.seconds += absl::ToDoubleSeconds(absl::Now() - start);
  ASSIGN_OR_RETURN(const library::DocumentText* const document, open.Document());
  tally.Add(*document, question.prompt, question.answer, sources, most);
  return absl::OkStatus();
}

absl::Status AskOne(const RetrievalFlags& flags, OpenDecoder& open, Match match, int64_t sources,
                    const Question& question, Tally& tally) {
  if (match == Match::kContains && absl::StripAsciiWhitespace(question.answer).empty()) {
    return absl::InvalidArgumentError("match=contains: every text holds an empty answer");
  }
  ASSIGN_OR_RETURN(
      const model::Seam prompt,
      EncodePrompt(flags.missing_bytes, "prompt of a question", open, question.prompt));
  decoder::GenerateOptions options;
  options.give_up = prompt.give_up;
  options.max_tokens = flags.max_tokens;
  ASSIGN_OR_RETURN(options.sampling, flags.sampling.Resolve({}));  // whatever the model advises
  options.trace = sources > 0;
  if (sources > 0) RETURN_IF_ERROR(open.Document().status());  // before anything is timed
  ASSIGN_OR_RETURN(const decoder::GenerateResult result,
                   open.decoder().Generate(prompt.tokens, options));
  ASSIGN_OR_RETURN(const std::string text,
                   open.checkpoint().tokenizer->Decode(result.ids, /*skip_special=*/true));
  const double score = Score(question, match, text);
  const bool right = score == 1;
  const bool agrees = question.has_dense_ids && result.ids == question.dense_ids;
  if (sources > 0 && right) {
    RETURN_IF_ERROR(CountSources(open, question, result.ids, sources, tally.sources));
  }
  tally.exact += Score(question, Match::kExact, text) == 1;
  tally.right += right;
  tally.score += score;
  tally.scores.push_back(score);
  tally.needles.Add(question, right);
  tally.with_dense += question.has_dense_ids;
  tally.agreeing += agrees;
  tally.prompt_tokens += static_cast<int64_t>(prompt.tokens.size());
  tally.tokens += static_cast<int64_t>(result.ids.size());
  tally.steps += result.steps;
  tally.prompt_seconds += result.prompt_seconds;
  tally.generate_seconds += result.generate_seconds;
  Tally::Answer answer = {question.prompt, text, question.answer, result.ids, score};
  if (tally.keep) tally.answers.push_back(answer);
  if (question.has_dense_ids ? !agrees : !right) tally.differing.push_back(std::move(answer));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Match> ParseMatch(absl::string_view name) {
  if (name == "exact") return Match::kExact;
  if (name == "contains") return Match::kContains;
  return absl::InvalidArgumentError(absl::StrCat("match=", name, " is none of exact, contains"));
}

absl::string_view MatchName(Match match) { return match == Match::kExact ? "exact" : "contains"; }

double Score(const Question& question, Match match, absl::string_view text) {
  if (question.HasParts()) {
    const std::string whole = absl::StrCat(question.begun, text);
    return question.pieces.empty() ? RecordOverlap(RecordsIn(whole), question.records)
                                   : PiecesFound(whole, question.pieces);
  }
  const absl::string_view answer = absl::StripAsciiWhitespace(question.answer);
  const bool right = match == Match::kExact ? absl::StripAsciiWhitespace(text) == answer
                                            : absl::StrContains(text, answer);
  return right ? 1 : 0;
}

absl::Status AskAll(const RetrievalFlags& flags, OpenDecoder& open, Match match, int64_t sources,
                    absl::Span<const Question> questions,
                    const std::function<void(size_t, const Tally&)>& before, Tally& tally) {
  for (size_t i = 0; i < questions.size(); ++i) {
    before(i, tally);
    RETURN_IF_ERROR(Annotate(open.Confirm(AskOne(flags, open, match, sources, questions[i], tally)),
                             absl::StrCat("question ", i + 1)));
  }
  return absl::OkStatus();
}

}  // namespace carrel::tools
