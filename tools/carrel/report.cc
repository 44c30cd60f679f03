#include "tools/carrel/report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/progress.h"

namespace carrel::tools {
namespace {

nlohmann::json OrNull(const decoder::Mean& mean) {
  return mean.count == 0 ? nlohmann::json() : nlohmann::json(mean.value());
}

std::string Cell(const decoder::Mean& mean) {
  return mean.count == 0 ? "-" : absl::StrFormat("%.3f", mean.value());
}

nlohmann::json BankJson(const decoder::BankStatistics& bank) {
  nlohmann::json json = {{"slots", bank.slots},
                         {"rows_wanted", bank.wanted},
                         {"hits", bank.hits},
                         {"hit_rate", Ratio(bank.hits, bank.wanted)}};
  if (bank.ahead == 0) return json;
  json["rows_ahead"] = bank.ahead;
  json["rows_ahead_fetched"] = bank.ahead - bank.ahead_hits;
  json["share_foreseen"] = Ratio(bank.foreseen, bank.expected);
  return json;
}

void AppendBanks(const decoder::Statistics& statistics, std::string& table) {
  bool title = false;
  for (size_t i = 0; i < statistics.layers.size(); ++i) {
    const decoder::BankStatistics& bank = statistics.layers[i].bank;
    if (bank.wanted == 0) continue;
    if (!title) {
      absl::StrAppendFormat(&table, "%5s %10s %10s %10s %14s\n", "layer", "rows held", "hits",
                            "foreseen", "fetched ahead");
      title = true;
    }
    absl::StrAppendFormat(
        &table, "%5d %10d %10.3f %10s %14.1f\n", i, bank.slots, Ratio(bank.hits, bank.wanted),
        bank.expected == 0 ? "-" : absl::StrFormat("%.3f", Ratio(bank.foreseen, bank.expected)),
        Ratio(bank.ahead - bank.ahead_hits, statistics.layers[i].tokens));
  }
}

// Root mean square over layers of what `error` says of each.
double CameOut(const decoder::Statistics& statistics) {
  double sum = 0;
  int64_t layers = 0;
  for (const decoder::LayerStatistics& layer : statistics.layers) {
    if (layer.output_error.count == 0) continue;
    sum += layer.output_error.value() * layer.output_error.value();
    ++layers;
  }
  return layers == 0 ? 0 : std::sqrt(sum / static_cast<double>(layers));
}

nlohmann::json PromisedOnName(decoder::PromisedOn on) {
  static constexpr const char* kNames[] = {"", "whole zone", "document", "probe"};
  if (on == decoder::PromisedOn::kNothing) return nullptr;
  return kNames[static_cast<size_t>(on)];
}

// Where a promise holds for another reason than that a question's queries were foreseen, or may not.
const char* Remark(decoder::PromisedOn on) {
  if (on == decoder::PromisedOn::kWholeZone) return " (all rows of the zone)";
  if (on == decoder::PromisedOn::kDocument) return " (on the document's own queries)";
  return "";
}

}  // namespace

nlohmann::json StatisticsJson(const decoder::Statistics& statistics, bool measured) {
  nlohmann::json layers = nlohmann::json::array();
  for (size_t i = 0; i < statistics.layers.size(); ++i) {
    const decoder::LayerStatistics& layer = statistics.layers[i];
    const int64_t top_k = select::TopKRows(layer.selection);
    nlohmann::json json = {
        {"layer", i},
        {"tokens", layer.tokens},
        {"top_k", top_k > 0                        ? nlohmann::json(top_k)
                  : select::IsAll(layer.selection) ? nlohmann::json("all")
                                                   : nlohmann::json("as selected")},
        {"rows_attended", layer.rows_attended},
        {"whole_prompt_tokens", layer.whole_tokens},
        {"estimated", layer.estimated},
        {"candidates", layer.candidates},
        {"visited", layer.visited},
        {"prefetched_tokens", layer.prefetched},
        {"verified_again_tokens", layer.verified_again},
        {"exposed_wait_us", layer.exposed_wait_us},
        {"bytes", layer.bytes_received},
        {"bytes_read", layer.bytes_read},
        {"cosine", OrNull(layer.cosine)}};
    if (layer.bank.slots > 0) json["bank"] = BankJson(layer.bank);
    if (measured) {
      json["prefetch_hit_rate"] = OrNull(layer.hit_rate);
      json["prefetch_kept_rate"] = OrNull(layer.kept_rate);
      json["mass"] = OrNull(layer.mass);
      json["attended_mass"] = OrNull(layer.attended_mass);
      json["output_error"] = OrNull(layer.output_error);
    }
    layers.push_back(std::move(json));
  }
  double rows = 0;
  for (const decoder::LayerStatistics& layer : statistics.layers) {
    rows += decoder::RowsPerToken(layer);
  }
  const auto layer_count = static_cast<double>(std::max<size_t>(1, statistics.layers.size()));
  return {{"layers", std::move(layers)},
          {"rows_per_layer_and_token", rows / layer_count},
          {"target_error", statistics.target_error},
          {"promised_error", statistics.promised_error},
          {"promised_on", PromisedOnName(statistics.promised_on)},
          {"bytes_sent", statistics.bytes_sent},
          {"bytes_received", statistics.bytes_received},
          {"window_bytes", statistics.window_bytes},
          {"device_bytes", statistics.device_bytes},
          {"weight_bytes", statistics.weight_bytes}};
}

std::string StatisticsTable(const decoder::Statistics& statistics, bool measured) {
  std::string table =
      absl::StrFormat("%5s %6s %12s %12s %10s %10s %12s %8s", "layer", "top_k", "candidates",
                      "attended", "wait us", "bytes", "asked ahead", "cosine");
  if (measured)
    absl::StrAppendFormat(&table, " %8s %8s %8s %8s %8s", "hit rate", "kept", "mass", "att.mass",
                          "error");
  table += "   (per token)\n";
  for (size_t i = 0; i < statistics.layers.size(); ++i) {
    const decoder::LayerStatistics& layer = statistics.layers[i];
    const int64_t top_k = select::TopKRows(layer.selection);
    absl::StrAppendFormat(&table, "%5d %6s %12.1f %12.1f %10.1f %10s %12.2f %8s", i,
                          top_k > 0                        ? absl::StrCat(top_k)
                          : select::IsAll(layer.selection) ? "all"
                                                           : "-",
                          Ratio(layer.candidates, layer.tokens), decoder::RowsPerToken(layer),
                          Ratio(layer.exposed_wait_us, layer.tokens),
                          FormatBytes(static_cast<int64_t>(
                              Ratio(layer.bytes_received + layer.bytes_read, layer.tokens))),
                          Ratio(layer.prefetched, layer.tokens), Cell(layer.cosine));
    if (measured)
      absl::StrAppendFormat(&table, " %8s %8s %8s %8s %8s", Cell(layer.hit_rate),
                            Cell(layer.kept_rate), Cell(layer.mass), Cell(layer.attended_mass),
                            Cell(layer.output_error));
    table += "\n";
  }
  AppendBanks(statistics, table);
  if (statistics.target_error > 0) {
    absl::StrAppendFormat(&table, "error of attention: aimed at %.3f, promised %.3f%s",
                          statistics.target_error, statistics.promised_error,
                          Remark(statistics.promised_on));
    // A GPU that holds the rows measures nothing.
    const bool came_out =
        measured && std::any_of(statistics.layers.begin(), statistics.layers.end(),
                                [](const decoder::LayerStatistics& layer) {
                                  return layer.output_error.count > 0;
                                });
    absl::StrAppend(&table,
                    came_out   ? absl::StrFormat(", measured here %.3f", CameOut(statistics))
                    : measured ? ", not measured where a GPU holds the rows"
                               : "",
                    "\n");
  }
  absl::StrAppend(&table, "window ", FormatBytes(statistics.window_bytes), ", sent ",
                  FormatBytes(statistics.bytes_sent), ", received ",
                  FormatBytes(statistics.bytes_received),
                  measured ? " (what was asked only to measure included)" : "", "\n");
  if (statistics.device_bytes > 0) {
    absl::StrAppend(&table, "GPU memory ", FormatBytes(statistics.device_bytes),
                    " of which weights ", FormatBytes(statistics.weight_bytes), "\n");
  }
  return table;
}

nlohmann::json PlanJson(const decoder::Plan& plan) {
  nlohmann::json ways = nlohmann::json::object();
  for (const decoder::PlannedWay& way : plan.ways) {
    nlohmann::json one = {{"seconds", way.seconds}, {"bytes", way.bytes}};
    one["error"] = way.error < 0 ? nlohmann::json() : nlohmann::json(way.error);
    if (!way.unfit.empty()) one["unfit"] = way.unfit;
    ways[decoder::WayName(way.way)] = std::move(one);
  }
  return {{"taken", decoder::WayName(plan.taken().way)},
          {"machine", plan.machine},
          {"ways", std::move(ways)}};
}

std::string AnswerLine(const serving::OpenedContext& context, const decoder::Statistics& statistics,
                       const decoder::GenerateResult& result, int32_t kv_heads,
                       int64_t prompt_tokens) {
  std::string line = context.plan.has_value()
                         ? absl::StrCat("plan ", decoder::WayName(context.plan->taken().way), ", ")
                         : "";
  const std::vector<decoder::LayerStatistics>& layers = statistics.layers;
  double rows = 0;
  for (const decoder::LayerStatistics& layer : layers) rows += decoder::RowsPerToken(layer);
  if (!layers.empty() && layers[0].tokens > 0 && context.tokens > 0) {
    absl::StrAppendFormat(&line, "%.1f of %d rows, ",
                          rows / static_cast<double>(kv_heads * std::ssize(layers)),
                          context.tokens);
  }
  absl::StrAppendFormat(&line, "%d prompt tokens in %.0f ms", prompt_tokens,
                        1e3 * result.prompt_seconds);
  if (result.steps > 0) {
    absl::StrAppendFormat(&line, ", %d tokens at %.1f ms", result.steps,
                          1e3 * result.generate_seconds / static_cast<double>(result.steps));
  }
  return line + "\n";
}

const char* StopReasonName(decoder::StopReason reason) {
  static constexpr const char* kNames[] = {"eos", "max_tokens", "context_length"};
  return kNames[static_cast<size_t>(reason)];
}

}  // namespace carrel::tools
