#include "tools/carrel/evaluation.h"

#include <deque>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/checksum.h"
#include "common/status.h"

namespace carrel::tools {
namespace {

std::string Digest(const std::vector<float>& logits) {
  return Sha256Hex({reinterpret_cast<const char*>(logits.data()), logits.size() * sizeof(float)});
}

// Asks the questions, so many at a time.
class Asker {
 public:
  Asker(const RetrievalFlags& flags, serving::Engine& engine, const serving::OpenedContext& context,
        Match match, int64_t sources, absl::Span<const eval::Question> questions,
        const std::function<void(size_t, const Tally&)>& before, Tally& tally)
      : flags_(flags),
        engine_(engine),
        context_(context),
        match_(match),
        sources_(sources),
        questions_(questions),
        before_(before),
        tally_(tally),
        ended_(questions.size()) {}

  // What is on its way when one fails is waited for.
  absl::Status Run(int64_t together) {
    absl::Status status;
    int64_t going = 0;
    for (size_t next = 0; going > 0 || (status.ok() && next < questions_.size());) {
      if (status.ok() && going < together && next < questions_.size()) {
        before_(next, tally_);
        status = Named(next, Begin(next));
        going += status.ok();
        ++next;
        continue;
      }
      auto [question, answer] = TakeAnswered();
      --going;
      if (status.ok()) status = Named(question, End(question, std::move(answer)));
    }
    return status;
  }

 private:
  using Done = absl::StatusOr<serving::AnswerJob::Done>;
  using Answered = std::pair<size_t, Done>;  // question

  static absl::Status Named(size_t question, const absl::Status& status) {
    return Annotate(status, absl::StrCat("question ", question + 1));
  }

  absl::Status Begin(size_t i) {
    const eval::Question& question = questions_[i];
    if (match_ == Match::kContains && absl::StripAsciiWhitespace(question.answer).empty()) {
      return absl::InvalidArgumentError("match=contains: every text holds an empty answer");
    }
    ASSIGN_OR_RETURN(model::Seam prompt, EncodePrompt(flags_, "prompt of a question", engine_,
                                                      context_, question.prompt));
    ended_[i].prompt_tokens = static_cast<int64_t>(prompt.tokens.size());
    serving::AnswerJob job;
    job.context = flags_.context;
    job.content_id = context_.content_id;
    job.prompt = std::move(prompt.tokens);
    job.give_up = prompt.give_up;
    job.resume = false;
    job.max_tokens = flags_.max_tokens;
    ASSIGN_OR_RETURN(job.sampling, flags_.sampling.Resolve({}));  // whatever the model advises
    job.keep_logits = tally_.digest;
    job.sources = sources_;
    job.done = [this, i](Done done) {
      absl::MutexLock lock(&mu_);
      answered_.emplace_back(i, std::move(done));
    };
    return engine_.Submit(std::move(job));
  }

  Answered TakeAnswered() {
    absl::MutexLock lock(&mu_);
    const auto some = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !answered_.empty(); };
    mu_.Await(absl::Condition(&some));
    Answered first = std::move(answered_.front());
    answered_.pop_front();
    return first;
  }

  absl::Status End(size_t i, Done answer) {
    RETURN_IF_ERROR(answer.status());
    Ended& ended = ended_[i];
    ended.result = std::move(answer->result);
    if (tally_.digest) ended.logits_sha256 = Digest(std::exchange(ended.result.logits, {}));
    ASSIGN_OR_RETURN(ended.text, engine_.checkpoint().tokenizer->Decode(ended.result.ids,
                                                                        /*skip_special=*/true));
    const eval::Question& question = questions_[i];
    if (sources_ > 0 && Score(question, match_, ended.text) == 1) {
      if (!document_.has_value()) {
        ASSIGN_OR_RETURN(document_, engine_.Document(flags_.context, context_.content_id));
      }
      tally_.sources.seconds += answer->sources_seconds;
      tally_.sources.Add(*document_, question.prompt, question.answer, answer->sources, sources_);
    }
    ended.over = true;
    for (; counted_ < questions_.size() && ended_[counted_].over; ++counted_) {
      Count(questions_[counted_], std::exchange(ended_[counted_], {}));
    }
    return absl::OkStatus();
  }

  struct Ended {
    bool over = false;
    int64_t prompt_tokens = 0;
    decoder::GenerateResult result;
    std::string text, logits_sha256;
  };

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
  serving::Engine& engine_;
  const serving::OpenedContext& context_;
  const Match match_;
  const int64_t sources_;
  const absl::Span<const eval::Question> questions_;
  const std::function<void(size_t, const Tally&)>& before_;
  Tally& tally_;
  std::optional<library::DocumentText> document_;  // once sources are counted
  std::vector<Ended> ended_;                       // until all before them are counted
  size_t counted_ = 0;
  absl::Mutex mu_;
  std::deque<Answered> answered_ ABSL_GUARDED_BY(mu_);
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

absl::Status AskAll(const RetrievalFlags& flags, serving::Engine& engine,
                    const serving::OpenedContext& context, int64_t together, Match match,
                    int64_t sources, absl::Span<const eval::Question> questions,
                    const std::function<void(size_t, const Tally&)>& before, Tally& tally) {
  return Asker(flags, engine, context, match, sources, questions, before, tally).Run(together);
}

}  // namespace carrel::tools
