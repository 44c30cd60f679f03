#include "tools/carrel/comparison.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/file.h"
#include "common/json.h"
#include "common/progress.h"
#include "common/shown.h"
#include "common/status.h"
#include "tools/carrel/evaluation.h"

namespace carrel::tools {
namespace {

std::string TextOf(const nlohmann::json& value) {
  return value.is_string() ? value.get<std::string>() : DumpJson(value);
}

absl::StatusOr<Configuration> ReadOne(const nlohmann::json& object, const RetrievalFlags& base) {
  if (!object.is_object()) return absl::InvalidArgumentError("is not an object of flags");
  Configuration configuration;
  configuration.flags = base;
  std::vector<std::string> arguments;
  std::string all;
  for (const auto& [key, value] : object.items()) {
    if (!value.is_string() && !value.is_number()) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", Shown(key), "\" is neither a string nor a number"));
    }
    if (key == "name") {
      configuration.name = TextOf(value);
      continue;
    }
    arguments.push_back(absl::StrCat("--", key, "=", TextOf(value)));
    const std::string word = absl::StrCat(key, "=", TextOf(value));
    absl::StrAppend(&all, all.empty() ? "" : " ", word);
    if (key == "top-k") continue;
    absl::StrAppend(&configuration.line, configuration.line.empty() ? "" : " ", word);
  }
  if (configuration.name.empty()) configuration.name = all;
  CLI::App app;
  configuration.flags.Declare(app, /*context_required=*/true);
  // What the command line gave already need not be given again.
  app.get_option("--model")->required(false);
  app.get_option("--context")->required(false);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  try {
    app.parse(arguments);
  } catch (const CLI::Error& error) {
    return absl::InvalidArgumentError(Shown(error.what(), 512));
  }
  if (const absl::Status status = configuration.flags.Resolve(); !status.ok()) {
    return absl::Status(status.code(), Shown(status.message(), 512));
  }
  return configuration;
}

double PerToken(double total, int64_t tokens) {
  return tokens == 0 ? 0 : total / static_cast<double>(tokens);
}

void AddCosts(const decoder::Statistics& statistics, int32_t group, ComparedRun& run) {
  for (const decoder::LayerStatistics& layer : statistics.layers) {
    run.rows_attended += decoder::RowsPerToken(layer);
    run.keys_visited += PerToken(static_cast<double>(layer.visited / group), layer.tokens);
    run.bytes_moved +=
        PerToken(static_cast<double>(layer.bytes_received + layer.bytes_read), layer.tokens);
  }
}

// The model of a configuration: the last one's, where it is the same.
class LastModel {
 public:
  absl::StatusOr<std::shared_ptr<library::LoadedModel>> Of(const RetrievalFlags& flags) {
    const auto key = std::tuple(flags.model_dir, flags.adapter_dir, flags.threads);
    if (model_ == nullptr || key != key_) {
      model_.reset();  // one at a time
      ASSIGN_OR_RETURN(model_, LoadModel(flags));
      key_ = key;
    }
    return model_;
  }

 private:
  std::tuple<std::string, std::string, int> key_;
  std::shared_ptr<library::LoadedModel> model_;
};

// A configuration's engine, with the context open in it.
struct Open {
  std::unique_ptr<serving::Engine> engine;
  serving::OpenedContext context;

  static absl::StatusOr<Open> Of(const RetrievalFlags& flags,
                                 std::shared_ptr<library::LoadedModel> model, int64_t count) {
    Open open;
    ASSIGN_OR_RETURN(open.engine, StartEngine(flags, std::move(model), count));
    ASSIGN_OR_RETURN(open.context, OpenContext(flags, *open.engine, count));
    return open;
  }
};

absl::Status Measure(absl::Span<const eval::Question> questions, Match match, LastModel& models,
                     ComparedRun& run) {
  RetrievalFlags flags = run.configuration.flags;
  flags.config.measure = true;
  ASSIGN_OR_RETURN(const std::shared_ptr<library::LoadedModel> model, models.Of(flags));
  ASSIGN_OR_RETURN(const Open open, Open::Of(flags, model, /*count=*/1));
  Tally ignored;
  RETURN_IF_ERROR(AskAll(
      flags, *open.engine, open.context, /*together=*/1, match, /*sources=*/0, questions,
      [](size_t, const Tally&) {}, ignored));
  decoder::Mean error, mass;
  const decoder::Statistics statistics = open.engine->statistics();
  for (const decoder::LayerStatistics& layer : statistics.layers) {
    run.output_error.push_back(layer.output_error.value());
    // With positions of its own, attention to all rows has other scores: there is no share of it.
    const double share =
        layer.attended_mass.count == 0 ? std::nan("") : layer.attended_mass.value();
    run.attended_mass.push_back(share);
    error.Add(layer.output_error.value());
    mass.Add(share);
  }
  run.mean_output_error = error.value();
  run.mean_attended_mass = mass.value();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<Configuration>> ReadConfigurations(const std::string& path,
                                                              const RetrievalFlags& base) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  ASSIGN_OR_RETURN(const nlohmann::json json, ParseJson(text, path));
  if (!json.is_array() || json.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a list of configurations"));
  }
  std::vector<Configuration> configurations;
  for (const nlohmann::json& object : json) {
    absl::StatusOr<Configuration> one = ReadOne(object, base);
    if (!one.ok()) {
      return Annotate(one.status(), absl::StrCat(path, ": configuration ",
                                                 configurations.size() + 1, " of ", json.size()));
    }
    configurations.push_back(*std::move(one));
  }
  return configurations;
}

absl::StatusOr<Comparison> Compare(absl::Span<const Configuration> configurations,
                                   absl::Span<const eval::Question> questions, int64_t measured,
                                   Match match, int64_t together, bool keep_answers) {
  Comparison comparison;
  comparison.match = match;
  comparison.context = configurations.front().flags.context;
  comparison.questions = static_cast<int64_t>(questions.size());
  comparison.measured_questions = std::min(measured, comparison.questions);
  Progress progress(Progress::ModeFor(stderr) == Progress::Mode::kTerminal
                        ? Progress::Mode::kTerminal
                        : Progress::Mode::kQuiet);
  LastModel models;
  const int64_t at_once = std::clamp<int64_t>(comparison.questions, 1, together);
  std::optional<Open> before;  // the last one's: what it has on a GPU is the next one's, too
  for (size_t i = 0; i < configurations.size(); ++i) {
    ComparedRun run;
    run.configuration = configurations[i];
    const RetrievalFlags& flags = run.configuration.flags;
    const auto work = [&]() -> absl::Status {
      ASSIGN_OR_RETURN(const std::shared_ptr<library::LoadedModel> model, models.Of(flags));
      absl::StatusOr<Open> open = Open::Of(flags, model, at_once);
      const bool no_room = absl::IsResourceExhausted(open.status()) && before.has_value();
      before.reset();
      if (no_room) open = Open::Of(flags, model, at_once);
      RETURN_IF_ERROR(open.status());
      comparison.context_tokens = open->context.tokens;
      Tally& tally = run.tally;
      tally.keep = keep_answers;
      const auto show = [&](size_t question, const Tally& so_far) {
        const double done = static_cast<double>(i) +
                            static_cast<double>(question) / static_cast<double>(questions.size());
        progress.Update(done / static_cast<double>(configurations.size()),
                        absl::StrCat(run.configuration.name, "  question ", question + 1, "/",
                                     questions.size(), "  ", so_far.right, " right"));
      };
      RETURN_IF_ERROR(AskAll(flags, *open->engine, open->context, at_once, match, /*sources=*/0,
                             questions, show, tally));
      run.prompt_ms_per_token = PerToken(1e3 * tally.prompt_seconds, tally.prompt_tokens);
      run.ms_per_token = PerToken(1e3 * tally.generate_seconds, tally.steps);
      const decoder::Statistics statistics = open->engine->statistics();
      run.promised_error = statistics.promised_error;
      AddCosts(statistics, open->engine->checkpoint().config.shape.group(), run);
      if (flags.device_config.device == model::Device::kCuda) before = *std::move(open);
      return absl::OkStatus();
    };
    RETURN_IF_ERROR(Annotate(work(), run.configuration.name));
    if (comparison.measured_questions > 0) {
      const auto first = questions.subspan(0, static_cast<size_t>(comparison.measured_questions));
      before.reset();
      RETURN_IF_ERROR(Annotate(Measure(first, match, models, run), run.configuration.name));
    }
    comparison.runs.push_back(std::move(run));
  }
  progress.Clear();
  return comparison;
}

}  // namespace carrel::tools
