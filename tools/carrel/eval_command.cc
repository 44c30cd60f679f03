#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/file.h"
#include "common/progress.h"
#include "common/status.h"
#include "eval/questions.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/comparison.h"
#include "tools/carrel/evaluation.h"
#include "tools/carrel/given_files.h"
#include "tools/carrel/json_report.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/lab.h"
#include "tools/carrel/report.h"
#include "tools/carrel/retrieval_flags.h"

namespace carrel::tools {
namespace {

struct EvalFlags {
  RetrievalFlags retrieval;
  std::string questions;
  std::vector<std::string> also;  // "CONTEXT=FILE"
  std::string compare;
  std::optional<std::string> html;
  int64_t measure = 4;
  int64_t sources = 0;
  int64_t together = 1;
  std::string match_name = "exact";
  Match match = Match::kExact;
  std::string answers = "differing";
  bool logits_digest = false;
  bool stats = false;
  bool json = false;
};

absl::Status RunComparison(const EvalFlags& flags) {
  if (flags.sources > 0)
    return absl::InvalidArgumentError("--sources is of one configuration, not of --compare");
  if (flags.stats)
    return absl::InvalidArgumentError(
        "--stats is of one configuration; --compare measures --measure questions of each");
  if (flags.logits_digest)
    return absl::InvalidArgumentError("logits-digest is of one configuration, not of --compare");
  if (flags.measure < 0)
    return absl::InvalidArgumentError(absl::StrCat("measure=", flags.measure, " is negative"));
  if (flags.html.has_value()) RETURN_IF_ERROR(CheckPage(*flags.html));
  ASSIGN_OR_RETURN(const std::vector<Configuration> configurations,
                   ReadConfigurations(flags.compare, flags.retrieval));
  ASSIGN_OR_RETURN(const std::vector<eval::Question> questions,
                   eval::ReadQuestions(flags.questions));
  ASSIGN_OR_RETURN(const Comparison comparison,
                   Compare(configurations, questions, flags.measure, flags.match, flags.together,
                           flags.answers == "all"));
  if (flags.html.has_value())
    RETURN_IF_ERROR(WriteFileAtomically(*flags.html, ComparisonPage(comparison)));
  return Report(flags.json, ComparisonJson(comparison), ComparisonMarkdown(comparison));
}

struct Document {
  std::string context;
  std::vector<eval::Question> questions;
};

// The context of --context, then those of --also.
absl::StatusOr<std::vector<Document>> ReadDocuments(const EvalFlags& flags) {
  std::vector<Document> documents(1);
  documents[0].context = flags.retrieval.context;
  ASSIGN_OR_RETURN(documents[0].questions, eval::ReadQuestions(flags.questions));
  for (const std::string& also : flags.also) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(also, absl::MaxSplits('=', 1));
    if (parts.first.empty() || parts.second.empty())
      return absl::InvalidArgumentError(absl::StrCat("also=", also, " is not CONTEXT=FILE"));
    documents.push_back({parts.first, {}});
    ASSIGN_OR_RETURN(documents.back().questions, eval::ReadQuestions(parts.second));
  }
  return documents;
}

nlohmann::json SourcesJson(int64_t most, const eval::SourceTally& tally) {
  return {{"most", most},
          {"right_answers", tally.asked},
          {"with_fact", tally.with_fact},
          {"with_every_fact", tally.with_every},
          {"share", tally.asked == 0 ? nlohmann::json()
                                     : nlohmann::json(static_cast<double>(tally.with_fact) /
                                                      static_cast<double>(tally.asked))},
          {"seconds", tally.seconds},
          {"missed", tally.missed}};
}

double Rate(const Tally& tally) {
  return tally.generate_seconds > 0 ? static_cast<double>(tally.steps) / tally.generate_seconds : 0;
}

// Of `asked` questions.
nlohmann::json ResultJson(const EvalFlags& flags, const Tally& tally, size_t asked) {
  nlohmann::json json = TallyJson(tally, static_cast<int64_t>(asked));
  json.update({{"questions", asked},
               {"match", MatchName(flags.match)},
               {"with_dense_ids", tally.with_dense},
               {"tokens_per_s", Rate(tally)},
               {"prompt_tokens", tally.prompt_tokens},
               {"prompt_seconds", tally.prompt_seconds},
               {"generate_seconds", tally.generate_seconds},
               {"differing", AnswersJson(tally.differing)}});
  if (flags.sources > 0) json["sources"] = SourcesJson(flags.sources, tally.sources);
  return json;
}

void PrintTally(const EvalFlags& flags, const Tally& tally, size_t asked, bool of_parts) {
  const std::string score =
      of_parts ? absl::StrFormat(", score %.3f", tally.score / static_cast<double>(asked)) : "";
  absl::FPrintF(stderr, "%d questions: %d right (%s)%s, %d of %d equal to dense, %.1f tokens/s\n",
                asked, tally.right, flags.match_name, score, tally.agreeing, tally.with_dense,
                Rate(tally));
  if (flags.sources > 0) {
    absl::FPrintF(
        stderr, "sources: of %d right answers %d have the passage with the fact in the first %d\n",
        tally.sources.asked, tally.sources.with_fact, flags.sources);
  }
  std::fputs(tally.needles.Table().c_str(), stderr);
}

absl::Status ResolveEval(EvalFlags& flags) {
  ASSIGN_OR_RETURN(flags.match, ParseMatch(flags.match_name));
  if (!flags.also.empty() && (!flags.compare.empty() || flags.stats)) {
    return absl::InvalidArgumentError(
        "--also adds up answers over contexts; --compare and --stats are of one context");
  }
  if (flags.answers != "differing" && flags.answers != "all") {
    return absl::InvalidArgumentError(
        absl::StrCat("answers=", flags.answers, " is none of differing, all"));
  }
  if (flags.logits_digest && flags.answers != "all")
    return absl::InvalidArgumentError("logits-digest is told with each answer: add --answers all");
  return absl::OkStatus();
}

absl::Status RunEval(EvalFlags& flags) {
  RETURN_IF_ERROR(ResolveEval(flags));
  if (!flags.compare.empty()) return RunComparison(flags);
  if (flags.html.has_value()) return absl::InvalidArgumentError("--html is a page of --compare");
  RETURN_IF_ERROR(flags.retrieval.Resolve());
  ASSIGN_OR_RETURN(const std::vector<Document> documents, ReadDocuments(flags));
  flags.retrieval.config.measure = flags.stats;
  Tally tally;
  tally.keep = flags.answers == "all";
  tally.digest = flags.logits_digest;
  Progress progress(Progress::ModeFor(stderr) == Progress::Mode::kTerminal
                        ? Progress::Mode::kTerminal
                        : Progress::Mode::kQuiet);
  size_t asked = 0;
  for (const Document& document : documents) asked += document.questions.size();
  size_t before = 0;  // questions of the contexts before
  const auto show = [&](size_t i, const Tally& so_far) {
    progress.Update(
        static_cast<double>(before + i) / static_cast<double>(asked),
        absl::StrCat("question ", before + i + 1, "/", asked, "  ", so_far.right, " right"));
  };
  ASSIGN_OR_RETURN(const std::shared_ptr<library::LoadedModel> model, LoadModel(flags.retrieval));
  ASSIGN_OR_RETURN(const std::unique_ptr<serving::Engine> engine,
                   StartEngine(flags.retrieval, model, flags.together));
  nlohmann::json contexts = nlohmann::json::array();
  bool of_parts = false;
  for (const Document& document : documents) {
    RetrievalFlags retrieval = flags.retrieval;
    retrieval.context = document.context;
    const int64_t together = std::clamp<int64_t>(std::ssize(document.questions), 1, flags.together);
    ASSIGN_OR_RETURN(const serving::OpenedContext context,
                     OpenContext(retrieval, *engine, together));
    const int64_t exact_before = tally.exact, right_before = tally.right;
    RETURN_IF_ERROR(Annotate(AskAll(retrieval, *engine, context, together, flags.match,
                                    flags.sources, document.questions, show, tally),
                             absl::StrCat("context ", document.context)));
    before += document.questions.size();
    for (const eval::Question& question : document.questions) of_parts |= question.HasParts();
    contexts.push_back({{"context", document.context},
                        {"context_tokens", context.tokens},
                        {"questions", document.questions.size()},
                        {"exact_matches", tally.exact - exact_before},
                        {"right", tally.right - right_before}});
    if (!context.method.empty()) contexts.back()["method"] = context.method;
  }
  progress.Clear();
  nlohmann::json json = ResultJson(flags, tally, asked);
  if (documents.size() == 1) {
    json["context"] = contexts[0]["context"];
    json["context_tokens"] = contexts[0]["context_tokens"];
    json["stats"] = StatisticsJson(engine->statistics(), flags.stats);
  } else {
    json["contexts"] = std::move(contexts);
  }
  if (!flags.json) {
    PrintTally(flags, tally, asked, of_parts);
    if (flags.stats) std::fputs(StatisticsTable(engine->statistics(), true).c_str(), stderr);
  }
  PrintJson(json);
  return absl::OkStatus();
}

}  // namespace

void AddEval(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App& command = *app.add_subcommand(
      "eval", "Ask a file of questions and count right answers; prints one JSON object at the end");
  flags->retrieval.Declare(command, /*context_required=*/true);
  command.get_option("--temperature")->description("0, the default: greedy");
  command.get_option("--top-p")->description(
      "nucleus sampling: the smallest token set with this probability");
  command
      .add_option("--questions", flags->questions,
                  "one JSON object a line: prompt, and answer, or answers (several pieces: the "
                  "share found is the score), or records (objects, answered as JSON: intersection "
                  "over union); maybe dense_ids; of carrel needle: also where the fact stands, for "
                  "a map of depth and length")
      ->required();
  command.add_option("--also", flags->also,
                     "CONTEXT=FILE: ask the questions of FILE of that context too, and add up; may "
                     "be repeated");
  command
      .add_option("--sources", flags->sources,
                  "count right answers whose passage with the fact is among so many sources; 0: do "
                  "not look for them")
      ->check(CLI::Range(int64_t{0}, int64_t{100}));
  command
      .add_option(
          "--together", flags->together,
          "so many questions at a time: each is answered as it is alone, all are sooner done")
      ->check(CLI::Range(int64_t{1}, int64_t{64}));
  command.add_option("--compare", flags->compare,
                     "a JSON list of configurations, objects of flag names and values: ask the "
                     "questions under each and print one table");
  command.add_option("--html", flags->html,
                     "compare: also write a page with curves of quality against cost");
  command.add_option(
      "--measure", flags->measure,
      "compare: so many questions are asked again to measure mass and output error per "
      "layer, apart from what is timed");
  command.add_option("--match", flags->match_name,
                     "when an answer is right: exact (it is the expected text) | contains (the "
                     "expected text is in it)");
  command.add_option("--answers", flags->answers,
                     "which are listed: differing (from dense_ids where these are given, else not "
                     "right) | all");
  command.add_flag("--logits-digest", flags->logits_digest,
                   "the SHA-256 of each answer's logits, of every prompt and generated position");
  MoveToLab(command, {"logits-digest"});
  command.add_flag("--stats", flags->stats, "also measure hit rate and mass per layer (slower)");
  command.add_flag("--json", flags->json, "nothing but the JSON object");
  command.callback([flags, &chosen] {
    chosen = [flags] {
      return WithNames(RunEval(*flags), flags->retrieval.store, flags->retrieval.context);
    };
  });
}

}  // namespace carrel::tools
