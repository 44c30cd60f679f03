#include "tools/carrel/evaluation.h"

#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/checksum.h"
#include "common/status.h"
#include "decoder/generation.h"

namespace carrel::tools {
namespace {

std::string Digest(const std::vector<float>& logits) {
  return Sha256Hex({reinterpret_cast<const char*>(logits.data()), logits.size() * sizeof(float)});
}

// A question that a decoder answers.
struct Asking {
  OpenDecoder* open = nullptr;
  size_t question = 0;
  int64_t prompt_tokens = 0;
  std::optional<decoder::Generation> generation;  // none: it is free
};

// Asks what is left of the questions, as decoders become free.
class Asker {
 public:
  Asker(const RetrievalFlags& flags, const OpenDecoders& decoders, Match match, int64_t sources,
        absl::Span<const eval::Question> questions,
        const std::function<void(size_t, const Tally&)>& before, Tally& tally)
      : flags_(flags),
        match_(match),
        sources_(sources),
        questions_(questions),
        before_(before),
        tally_(tally),
        askings_(decoders.size()),
        ended_(questions.size()) {
    for (size_t i = 0; i < decoders.size(); ++i) askings_[i].open = decoders[i].get();
  }

  absl::Status Run() {
    while (counted_ < questions_.size()) {
      std::vector<Asking*> going;
      std::vector<decoder::Generation*> generations;
      for (Asking& one : askings_) {
        if (!one.generation.has_value()) RETURN_IF_ERROR(Begin(one));
        if (!one.generation.has_value()) continue;
        going.push_back(&one);
        generations.push_back(&*one.generation);
      }
      const std::vector<absl::Status> steps = decoder::Generation::Step(generations);
      for (size_t i = 0; i < going.size(); ++i) {
        RETURN_IF_ERROR(Named(*going[i], steps[i]));
        if (going[i]->generation->done()) RETURN_IF_ERROR(Named(*going[i], End(*going[i])));
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Named(const Asking& one, const absl::Status& status) const {
    return Annotate(one.open->Confirm(status), absl::StrCat("question ", one.question + 1));
  }

  absl::Status Begin(Asking& one) {
    if (next_ == questions_.size()) return absl::OkStatus();
    before_(next_, tally_);
    one.question = next_++;
    return Named(one, BeginAnswer(one));
  }

  absl::Status BeginAnswer(Asking& one) {
    const eval::Question& question = questions_[one.question];
    if (match_ == Match::kContains && absl::StripAsciiWhitespace(question.answer).empty()) {
      return absl::InvalidArgumentError("match=contains: every text holds an empty answer");
    }
    ASSIGN_OR_RETURN(model::Seam prompt, EncodePrompt(flags_.missing_bytes, "prompt of a question",
                                                      *one.open, question.prompt));
    decoder::GenerateOptions options;
    options.give_up = prompt.give_up;
    options.max_tokens = flags_.max_tokens;
    ASSIGN_OR_RETURN(options.sampling, flags_.sampling.Resolve({}));  // whatever the model advises
    options.trace = sources_ > 0;
    options.keep_logits = tally_.digest;
    if (sources_ > 0) RETURN_IF_ERROR(one.open->Document().status());  // before anything is timed
    one.prompt_tokens = static_cast<int64_t>(prompt.tokens.size());
    ASSIGN_OR_RETURN(decoder::Generation generation,
                     decoder::Generation::Begin(one.open->decoder(), std::move(prompt.tokens),
                                                std::move(options)));
    one.generation.emplace(std::move(generation));
    return absl::OkStatus();
  }

  absl::Status End(Asking& one) {
    Ended ended{one.prompt_tokens, one.generation->TakeResult(), {}, {}};
    one.generation.reset();
    if (tally_.digest) ended.logits_sha256 = Digest(std::exchange(ended.result.logits, {}));
    ASSIGN_OR_RETURN(ended.text, one.open->checkpoint().tokenizer->Decode(ended.result.ids,
                                                                          /*skip_special=*/true));
    const eval::Question& question = questions_[one.question];
    if (sources_ > 0 && Score(question, match_, ended.text) == 1) {
      RETURN_IF_ERROR(CountSources(*one.open, question, ended.result.ids));
    }
    ended_[one.question] = std::move(ended);
    for (; counted_ < questions_.size() && ended_[counted_].has_value(); ++counted_) {
      Count(questions_[counted_], *std::move(ended_[counted_]));
    }
    return absl::OkStatus();
  }

  struct Ended {
    int64_t prompt_tokens = 0;
    decoder::GenerateResult result;
    std::string text, logits_sha256;
  };

  absl::Status CountSources(OpenDecoder& open, const eval::Question& question,
                            const std::vector<TokenId>& answer) {
    const absl::Time start = absl::Now();
    ASSIGN_OR_RETURN(const std::vector<library::Source> found, open.Sources(answer, sources_));
    tally_.sources.seconds += absl::ToDoubleSeconds(absl::Now() - start);
    ASSIGN_OR_RETURN(const library::DocumentText* const document, open.Document());
    tally_.sources.Add(*document, question.prompt, question.answer, found, sources_);
    return absl::OkStatus();
  }

  // In the questions' order.
  void Count(const eval::Question& question, Ended ended) {
    const decoder::GenerateResult& result = ended.result;
    const double score = Score(question, match_, ended.text);
    const bool right = score == 1;
    const bool agrees = question.has_dense_ids && result.ids == question.dense_ids;
    tally_.exact += Score(question, Match::kExact, ended.text) == 1;
    tally_.right += right;
    tally_.score += score;
    tally_.scores.push_back(score);
    tally_.needles.Add(question, right);
    tally_.with_dense += question.has_dense_ids;
    tally_.agreeing += agrees;
    tally_.prompt_tokens += ended.prompt_tokens;
    tally_.tokens += static_cast<int64_t>(result.ids.size());
    tally_.steps += result.steps;
    tally_.prompt_seconds += result.prompt_seconds;
    tally_.generate_seconds += result.generate_seconds;
    Tally::Answer answer = {question.prompt, ended.text, question.answer,
                            result.ids,      score,      ended.logits_sha256};
    if (tally_.keep) tally_.answers.push_back(answer);
    if (question.has_dense_ids ? !agrees : !right) tally_.differing.push_back(std::move(answer));
  }

  const RetrievalFlags& flags_;
  const Match match_;
  const int64_t sources_;
  const absl::Span<const eval::Question> questions_;
  const std::function<void(size_t, const Tally&)>& before_;
  Tally& tally_;
  std::vector<Asking> askings_;
  std::vector<std::optional<Ended>> ended_;  // until all before them are counted
  size_t next_ = 0, counted_ = 0;
};

}  // namespace

absl::StatusOr<Match> ParseMatch(absl::string_view name) {
  if (name == "exact") return Match::kExact;
  if (name == "contains") return Match::kContains;
  return absl::InvalidArgumentError(absl::StrCat("match=", name, " is none of exact, contains"));
}

absl::string_view MatchName(Match match) { return match == Match::kExact ? "exact" : "contains"; }

double Score(const eval::Question& question, Match match, absl::string_view text) {
  if (question.HasParts()) {
    const std::string whole = absl::StrCat(question.begun, text);
    return question.pieces.empty() ? eval::RecordOverlap(eval::RecordsIn(whole), question.records)
                                   : eval::PiecesFound(whole, question.pieces);
  }
  const absl::string_view answer = absl::StripAsciiWhitespace(question.answer);
  const bool right = match == Match::kExact ? absl::StripAsciiWhitespace(text) == answer
                                            : absl::StrContains(text, answer);
  return right ? 1 : 0;
}

absl::Status AskAll(const RetrievalFlags& flags, const OpenDecoders& decoders, Match match,
                    int64_t sources, absl::Span<const eval::Question> questions,
                    const std::function<void(size_t, const Tally&)>& before, Tally& tally) {
  return Asker(flags, decoders, match, sources, questions, before, tally).Run();
}

decoder::Statistics StatisticsOf(const OpenDecoders& decoders) {
  decoder::Statistics sum = decoders.front()->decoder().statistics();
  for (size_t i = 1; i < decoders.size(); ++i) {
    decoder::AddStatistics(decoders[i]->decoder().statistics(), sum);
  }
  return sum;
}

}  // namespace carrel::tools
