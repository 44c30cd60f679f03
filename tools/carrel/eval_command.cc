#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "common/progress.h"
#include "common/status.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/questions.h"
#include "tools/carrel/report.h"
#include "tools/carrel/retrieval_flags.h"

namespace carrel::tools {
namespace {

struct EvalFlags {
  RetrievalFlags retrieval;
  std::string questions;
  bool stats = false;
  bool json = false;
};

struct Tally {
  int64_t exact = 0, with_dense = 0, agreeing = 0, prompt_tokens = 0, tokens = 0;
  double prompt_seconds = 0, generate_seconds = 0;
  nlohmann::json differing = nlohmann::json::array();
};

absl::Status AskOne(const EvalFlags& flags, OpenDecoder& open, const Question& question, Tally& tally) {
  ASSIGN_OR_RETURN(const std::vector<TokenId> prompt, open.checkpoint().EncodePrompt(question.prompt));
  decoder::GenerateOptions options;
  options.max_tokens = flags.retrieval.max_tokens;
  options.sampling = flags.retrieval.sampling;
  ASSIGN_OR_RETURN(const decoder::GenerateResult result, open.decoder().Generate(prompt, options));
  ASSIGN_OR_RETURN(const std::string text, open.checkpoint().tokenizer->Decode(result.ids, /*skip_special=*/true));
  const bool exact = absl::StripAsciiWhitespace(text) == absl::StripAsciiWhitespace(question.answer);
  const bool agrees = question.has_dense_ids && result.ids == question.dense_ids;
  tally.exact += exact;
  tally.with_dense += question.has_dense_ids;
  tally.agreeing += agrees;
  tally.prompt_tokens += static_cast<int64_t>(prompt.size());
  tally.tokens += static_cast<int64_t>(result.ids.size());
  tally.prompt_seconds += result.prompt_seconds;
  tally.generate_seconds += result.generate_seconds;
  if (question.has_dense_ids ? !agrees : !exact) {
    tally.differing.push_back({{"prompt", question.prompt}, {"text", text}, {"answer", question.answer}, {"ids", result.ids}});
  }
  return absl::OkStatus();
}

absl::Status RunEval(EvalFlags& flags) {
  RETURN_IF_ERROR(flags.retrieval.Resolve());
  ASSIGN_OR_RETURN(const std::vector<Question> questions, ReadQuestions(flags.questions));
  flags.retrieval.config.measure = flags.stats;
  ASSIGN_OR_RETURN(const std::unique_ptr<OpenDecoder> open, OpenDecoder::Create(flags.retrieval));
  Tally tally;
  Progress progress(Progress::ModeFor(stderr) == Progress::Mode::kTerminal ? Progress::Mode::kTerminal : Progress::Mode::kQuiet);
  const double total = static_cast<double>(questions.size());
  for (size_t i = 0; i < questions.size(); ++i) {
    progress.Update(static_cast<double>(i) / total, absl::StrCat("question ", i + 1, "/", questions.size(), "  ", tally.exact, " exact"));
    RETURN_IF_ERROR(Annotate(AskOne(flags, *open, questions[i], tally), absl::StrCat("question ", i + 1)));
  }
  progress.Clear();
  const double rate = tally.generate_seconds > 0 ? static_cast<double>(tally.tokens) / tally.generate_seconds : 0;
  nlohmann::json json = {{"context", flags.retrieval.context},
                         {"context_tokens", open->decoder().context_tokens()},
                         {"questions", questions.size()},
                         {"exact_match", static_cast<double>(tally.exact) / total},
                         {"exact_matches", tally.exact},
                         {"agreement", tally.with_dense == 0 ? nlohmann::json() : nlohmann::json(static_cast<double>(tally.agreeing) / static_cast<double>(tally.with_dense))},
                         {"agreements", tally.agreeing},
                         {"with_dense_ids", tally.with_dense},
                         {"tokens_per_s", rate},
                         {"generated_tokens", tally.tokens},
                         {"prompt_tokens", tally.prompt_tokens},
                         {"prompt_seconds", tally.prompt_seconds},
                         {"generate_seconds", tally.generate_seconds},
                         {"differing", tally.differing}};
  json["stats"] = StatisticsJson(open->decoder().statistics(), flags.stats);
  if (!flags.json) {
    std::fprintf(stderr, "%d questions: %d exact, %d of %d equal to dense, %.1f tokens/s\n", static_cast<int>(questions.size()),
                 static_cast<int>(tally.exact), static_cast<int>(tally.agreeing), static_cast<int>(tally.with_dense), rate);
    if (flags.stats) std::fputs(StatisticsTable(open->decoder().statistics(), true).c_str(), stderr);
  }
  std::printf("%s\n", json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  return absl::OkStatus();
}

}  // namespace

void AddEval(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App& command = *app.add_subcommand("eval", "Ask a file of questions and count right answers; prints one JSON object at the end");
  flags->retrieval.Declare(command, /*context_required=*/true);
  command.add_option("--questions", flags->questions, "one JSON object a line: prompt, answer, maybe dense_ids")->required();
  command.add_flag("--stats", flags->stats, "also measure hit rate and mass per layer (slower)");
  command.add_flag("--json", flags->json, "nothing but the JSON object");
  command.callback([flags, &chosen] { chosen = [flags] { return RunEval(*flags); }; });
}

}  // namespace carrel::tools
