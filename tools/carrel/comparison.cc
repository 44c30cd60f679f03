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
#include "audit/html_figures.h"
#include "audit/html_style.h"
#include "common/file.h"
#include "common/json.h"
#include "common/progress.h"
#include "common/shown.h"
#include "common/status.h"
#include "common/version.h"
#include "tools/carrel/evaluation.h"
#include "tools/carrel/report.h"

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

void AddCosts(const decoder::Statistics& statistics, int32_t group, ComparedRun& run) {
  for (const decoder::LayerStatistics& layer : statistics.layers) {
    run.rows_attended += decoder::RowsPerToken(layer);
    run.keys_visited += Ratio(layer.visited / group, layer.tokens);
    run.bytes_moved += Ratio(layer.bytes_received + layer.bytes_read, layer.tokens);
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

bool Measured(const Comparison& comparison) { return comparison.measured_questions > 0; }

// The columns of both tables.
std::vector<std::string> Columns(const Comparison& comparison) {
  std::vector<std::string> columns = {"configuration", std::string(MatchName(comparison.match)),
                                      "as dense"};
  if (Measured(comparison)) {
    columns.insert(columns.end(), {"output error", "mass attended"});
  }
  columns.insert(columns.end(), {"rows attended / token", "keys visited / token", "moved / token",
                                 "ms / token", "ms / prompt token"});
  return columns;
}

std::vector<std::string> Cells(const Comparison& comparison, const ComparedRun& run) {
  std::vector<std::string> cells = {
      run.configuration.name, absl::StrCat(run.tally.right, "/", comparison.questions),
      run.tally.with_dense == 0 ? "-"
                                : absl::StrCat(run.tally.agreeing, "/", run.tally.with_dense)};
  if (Measured(comparison)) {
    cells.push_back(absl::StrFormat("%.4f", run.mean_output_error));
    cells.push_back(
        std::isnan(run.mean_attended_mass) ? "-" : absl::StrFormat("%.3f", run.mean_attended_mass));
  }
  cells.push_back(absl::StrFormat("%.0f", run.rows_attended));
  cells.push_back(absl::StrFormat("%.0f", run.keys_visited));
  cells.push_back(FormatBytes(static_cast<int64_t>(run.bytes_moved)));
  cells.push_back(absl::StrFormat("%.2f", run.ms_per_token));
  cells.push_back(absl::StrFormat("%.2f", run.prompt_ms_per_token));
  return cells;
}

// Quality that a curve shows: agreement with dense answers if they are known, else right ones.
double Quality(const Comparison& comparison, const ComparedRun& run) {
  return run.tally.with_dense > 0 ? Ratio(run.tally.agreeing, run.tally.with_dense)
                                  : Ratio(run.tally.right, comparison.questions);
}

std::string Hover(const Comparison& comparison, const ComparedRun& run) {
  const std::vector<std::string> columns = Columns(comparison), cells = Cells(comparison, run);
  std::string hover = cells[0];
  for (size_t i = 1; i < cells.size(); ++i)
    absl::StrAppend(&hover, "\n", columns[i], " ", cells[i]);
  return hover;
}

struct Axis {
  std::string title, y_axis;
  bool error = false;  // downwards to 0; else a share, upwards to 1
};

audit::CurveChart ChartOf(const Comparison& comparison, const std::string& line, const Axis& axis) {
  audit::CurveChart chart;
  chart.title = absl::StrCat(line, ": ", axis.title);
  chart.x_axis = "ms per token";
  chart.y_axis = axis.y_axis;
  std::vector<std::pair<std::string, audit::CurveLine>> lines;
  double low = 1, high = 0;
  for (const ComparedRun& run : comparison.runs) {
    auto at = std::find_if(lines.begin(), lines.end(),
                           [&](const auto& l) { return l.first == run.configuration.line; });
    if (at == lines.end()) {
      audit::CurveLine added;
      added.name = run.configuration.line;
      added.thin = run.configuration.line != line;
      at = lines.insert(lines.end(), {run.configuration.line, added});
    }
    const double y = axis.error ? run.mean_output_error : Quality(comparison, run);
    low = std::min(low, y);
    high = std::max(high, y);
    audit::CurveNode node;
    node.x = std::max(run.ms_per_token, 1e-3);
    node.y = y;
    node.label = at->second.thin ? "" : run.configuration.flags.top_k.value_or("");
    // The others are told by name: every chart has all of them.
    node.hover = at->second.thin ? run.configuration.name : Hover(comparison, run);
    at->second.nodes.push_back(std::move(node));
  }
  for (auto& [name, of_line] : lines) chart.lines.push_back(std::move(of_line));
  chart.y_low = axis.error ? 0 : std::max(0.0, low - 0.05);
  chart.y_high = axis.error ? std::max(1e-3, 1.12 * high) : 1.02;
  chart.y_tick = [](double y) { return absl::StrFormat("%.2f", y); };
  return chart;
}

std::string Curves(const Comparison& comparison) {
  std::vector<std::string> lines;
  for (const ComparedRun& run : comparison.runs) {
    const std::string& line = run.configuration.line;
    if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(line);
  }
  std::string out =
      "<section><h2>Quality against cost</h2><p class=\"lead\">One row per method. Blue: the "
      "method at its budgets, the number of rows beside each point; grey: all others. Cost on a "
      "logarithmic scale: time per generated token.</p><div class=\"curves\">\n";
  const bool dense = comparison.runs.front().tally.with_dense > 0;
  for (const std::string& line : lines) {
    absl::StrAppend(
        &out, audit::CurveFigure(ChartOf(
                  comparison, line,
                  {"answers", dense ? "share equal to dense decoding" : "share right", false})));
    if (!Measured(comparison)) continue;
    absl::StrAppend(&out, audit::CurveFigure(ChartOf(comparison, line,
                                                     {"output error",
                                                      "relative, against dense attention, mean of "
                                                      "layers",
                                                      true})));
  }
  return out + "</div></section>\n";
}

std::string NeedleMaps(const Comparison& comparison) {
  std::string maps;
  for (const ComparedRun& run : comparison.runs) {
    if (run.tally.needles.empty()) continue;
    absl::StrAppend(&maps, "<h3>", audit::EscapeHtml(run.configuration.name), "</h3>\n",
                    run.tally.needles.Html());
  }
  if (maps.empty()) return maps;
  return absl::StrCat("<section><h2>By depth and length</h2>\n", maps, "</section>\n");
}

std::string HtmlTable(const Comparison& comparison) {
  std::string out = "<section><h2>All configurations</h2><table><thead><tr>";
  for (const std::string& column : Columns(comparison)) {
    absl::StrAppend(&out, column == "configuration" ? "<th class=\"text\">" : "<th>",
                    audit::EscapeHtml(column), "</th>");
  }
  out += "</tr></thead><tbody>\n";
  for (const ComparedRun& run : comparison.runs) {
    out += "<tr>";
    bool first = true;
    for (const std::string& cell : Cells(comparison, run)) {
      absl::StrAppend(&out, first ? "<td class=\"text\">" : "<td>", audit::EscapeHtml(cell),
                      "</td>");
      first = false;
    }
    out += "</tr>\n";
  }
  return out + "</tbody></table></section>\n";
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
      run.prompt_ms_per_token = Ratio(1e3 * tally.prompt_seconds, tally.prompt_tokens);
      run.ms_per_token = Ratio(1e3 * tally.generate_seconds, tally.steps);
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

nlohmann::json AnswersJson(const std::vector<Tally::Answer>& answers) {
  nlohmann::json json = nlohmann::json::array();
  for (const Tally::Answer& a : answers) {
    json.push_back({{"prompt", a.prompt},
                    {"text", a.text},
                    {"answer", a.answer},
                    {"ids", a.ids},
                    {"score", a.score}});
    if (!a.logits_sha256.empty()) json.back()["logits_sha256"] = a.logits_sha256;
  }
  return json;
}

nlohmann::json TallyJson(const Tally& tally, int64_t asked) {
  nlohmann::json json = {
      {"exact_matches", tally.exact}, {"exact_match", Ratio(tally.exact, asked)},
      {"right", tally.right},         {"score", tally.score / static_cast<double>(asked)},
      {"scores", tally.scores},       {"agreements", tally.agreeing},
      {"agreement", nullptr},         {"generated_tokens", tally.tokens}};
  if (tally.with_dense > 0) json["agreement"] = Ratio(tally.agreeing, tally.with_dense);
  if (tally.keep) json["answers"] = AnswersJson(tally.answers);
  if (!tally.needles.empty()) json["needles"] = tally.needles.Json();
  return json;
}

nlohmann::json ComparisonJson(const Comparison& comparison) {
  nlohmann::json runs = nlohmann::json::array();
  for (const ComparedRun& run : comparison.runs) {
    nlohmann::json json = {{"name", run.configuration.name},
                           {"line", run.configuration.line},
                           {"top_k", run.configuration.flags.top_k.value_or("")},
                           {"promised_error", run.promised_error},
                           {"rows_attended_per_token", run.rows_attended},
                           {"keys_visited_per_token", run.keys_visited},
                           {"bytes_moved_per_token", run.bytes_moved},
                           {"ms_per_token", run.ms_per_token},
                           {"ms_per_prompt_token", run.prompt_ms_per_token}};
    if (Measured(comparison)) {
      json["output_error"] = run.mean_output_error;
      json["output_error_per_layer"] = run.output_error;
      json["attended_mass"] = run.mean_attended_mass;
      json["attended_mass_per_layer"] = run.attended_mass;
    }
    json.update(TallyJson(run.tally, comparison.questions));
    runs.push_back(std::move(json));
  }
  return {{"context", comparison.context},
          {"context_tokens", comparison.context_tokens},
          {"questions", comparison.questions},
          {"match", MatchName(comparison.match)},
          {"measured_questions", comparison.measured_questions},
          {"runs", std::move(runs)}};
}

std::string ComparisonMarkdown(const Comparison& comparison) {
  std::string out = "|", rule = "|";
  for (const std::string& column : Columns(comparison)) {
    absl::StrAppend(&out, " ", column, " |");
    absl::StrAppend(&rule, column == "configuration" ? "---|" : "---:|");
  }
  absl::StrAppend(&out, "\n", rule, "\n");
  for (const ComparedRun& run : comparison.runs) {
    out += "|";
    for (const std::string& cell : Cells(comparison, run)) absl::StrAppend(&out, " ", cell, " |");
    out += "\n";
  }
  for (const ComparedRun& run : comparison.runs) {
    if (run.tally.needles.empty()) continue;
    absl::StrAppend(&out, "\n", run.configuration.name, "\n", run.tally.needles.Table());
  }
  return out;
}

std::string ComparisonPage(const Comparison& comparison) {
  return absl::StrCat(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>",
      audit::EscapeHtml(comparison.context), ": retrieval compared</title><style>",
      audit::kPageStyle,
      "</style></head><body><main>\n<header><p class=\"kicker\">Carrel comparison</p><h1>",
      audit::EscapeHtml(comparison.context), "</h1><p class=\"shape\">", comparison.context_tokens,
      " tokens &middot; ", comparison.questions, " questions &middot; ", comparison.runs.size(),
      " configurations &middot; output error and mass over ", comparison.measured_questions,
      " questions &middot; carrel ", kVersion, "</p></header>\n", HtmlTable(comparison),
      Curves(comparison), NeedleMaps(comparison), "</main><script>", audit::kPageScript,
      "</script></body></html>\n");
}

}  // namespace carrel::tools
