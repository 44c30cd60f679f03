#include "audit/html_report.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "audit/efforts.h"
#include "audit/html_figures.h"
#include "audit/html_style.h"
#include "audit/summary.h"
#include "common/version.h"

namespace carrel::audit {
namespace {

constexpr size_t kWorstHeads = 12;
constexpr int32_t kMostLayerLines = 40;
// Maps of cost reach at least this share of exact search, so that pages compare.
constexpr double kCostScale = 1.5;

// 7703 -> "7,703".
std::string Grouped(double value) {
  std::string digits = absl::StrFormat("%.0f", value);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<size_t>(at), 1, ',');
  }
  return digits;
}

std::string Format(const char* form, double value) {
  if (!std::isfinite(value)) return "-";
  if (absl::string_view(form) == "%") return absl::StrFormat("%.1f%%", 100 * value);
  if (absl::string_view(form) == ",") return Grouped(value);
  if (absl::string_view(form) == "4") return absl::StrFormat("%.4f", value);
  if (absl::string_view(form) == "3") return absl::StrFormat("%.3f", value);
  if (absl::string_view(form) == "2") return absl::StrFormat("%.2f", value);
  return absl::StrFormat("%.0f", value);
}

std::string HeadName(const HeadAudit& head) {
  return absl::StrFormat("layer %d, KV head %d", head.layer.value(), head.kv_head.value());
}

std::string HeadHover(const AuditReport& report, const HeadAudit& head) {
  const Measured& m = head.judged;
  return absl::StrFormat(
      "%s\n%s%s\nrecall@%d %.4f (worst query %.4f)\nmass %.4f (worst q head %.4f; exact top rows "
      "%.4f)\noutput error %.4f (exact top rows %.4f; found to exact %.4f)\nvisited %s keys, "
      "%.1f%% "
      "of exact search\n%.0f us a search, exact %.0f us",
      HeadName(head), std::string(kvstore::IndexKindName(head.params.kind)),
      m.effort > 0 ? absl::StrFormat(", effort %d", m.effort) : "", report.config.top_k, m.recall,
      m.recall_least, m.mass, m.mass_least, head.exact.mass, m.output_error,
      head.exact.output_error, m.output_error_exact, Grouped(m.visited), 100 * m.visited_share,
      m.search_us, head.exact.search_us);
}

std::string Header(const AuditReport& report) {
  std::string out = absl::StrFormat(
      "<header><p class=\"kicker\">Carrel index audit</p><h1>%s</h1>\n"
      "<p class=\"shape\">%s tokens &middot; %d layers &middot; %d KV heads of %d q heads &middot; "
      "head_dim %d</p><p class=\"shape\">index <b>%s</b></p>\n",
      EscapeHtml(report.context), Grouped(static_cast<double>(report.tokens)), report.shape.layers,
      report.shape.kv_heads, report.shape.group(), report.shape.head_dim,
      EscapeHtml(DescribeIndexes(report)));
  absl::StrAppendFormat(
      &out,
      "<p class=\"lead\">What the context&#39;s index finds, held against exact search over the "
      "same keys: the top %d rows for %d queries of the document itself, in each of %d layer and "
      "KV head pairs.%s</p></header>\n",
      report.config.top_k, report.positions.size(), report.heads.size(),
      report.config.efforts.empty()
          ? ""
          : absl::StrFormat(" Judged at effort %d, as asked.", report.config.efforts.front()));
  return out;
}

// Only if a recall is wanted.
std::string Verdict(const AuditReport& report) {
  if (!report.config.want_recall.has_value()) return "";
  const size_t below = HeadsBelow(report).size();
  return absl::StrFormat(
      "<p class=\"verdict %s\">%s of %d heads reach the wanted recall of %g%s"
      "</p>\n",
      below > 0 ? "missed" : "reached",
      below > 0 ? absl::StrCat(report.heads.size() - below) : "All", report.heads.size(),
      *report.config.want_recall, below > 0 ? absl::StrFormat("; %d do not.", below) : ".");
}

std::string Tile(const std::string& name, const std::string& value, const std::string& more,
                 const std::string& note) {
  return absl::StrCat("<div class=\"tile\"><h3>", name, "</h3><p class=\"big\">", value, "</p><p>",
                      more, "</p><p class=\"note\">", note, "</p></div>\n");
}

std::string WorstText(const AuditReport& report, const Metric& metric) {
  const HeadAudit& worst = Worst(report.heads, metric);
  return absl::StrFormat("worst head %.4f <span class=\"at\">(%s)</span>", metric.of(worst),
                         HeadName(worst));
}

std::string KeyFigures(const AuditReport& report) {
  const Heads heads = report.heads;
  const double ms = SumMs(heads, kSearchUs), exact_ms = SumMs(heads, kExactSearchUs);
  const double row_bytes = 2.0 * report.shape.head_dim;
  const double bytes = IndexBytesPerKey(report);
  std::string out = "<section class=\"tiles\">\n";
  absl::StrAppend(
      &out, Tile(absl::StrCat("Recall@", report.config.top_k), Format("4", Mean(heads, kRecall)),
                 WorstText(report, kRecall), "share of the exact top rows that were found"));
  absl::StrAppend(
      &out, Tile("Mass found", Format("4", Mean(heads, kMass)), WorstText(report, kMass),
                 absl::StrFormat("share of the softmax on the rows found; on the exact top rows "
                                 "%.4f",
                                 Mean(heads, kExactMass))));
  absl::StrAppend(
      &out,
      Tile("Output error", Format("4", Mean(heads, kOutputErrorExact)),
           WorstText(report, kOutputErrorExact),
           absl::StrFormat("attention over the rows found against the exact top rows; against "
                           "the whole zone %.4f, where the exact rows alone come to %.4f",
                           Mean(heads, kOutputError), Mean(heads, kExactOutputError))));
  absl::StrAppend(
      &out,
      Tile("Search per token", absl::StrFormat("%.2f ms", ms),
           absl::StrFormat("exact search %.2f ms, %.1f times as long", exact_ms, exact_ms / ms),
           absl::StrFormat("all %d heads on one thread, medians added up", report.heads.size())));
  absl::StrAppend(
      &out, Tile("Index size", absl::StrFormat("%.1f B", bytes),
                 absl::StrFormat("per key; a K row has %.0f B", row_bytes),
                 absl::StrFormat("%.1f MiB in all", bytes * static_cast<double>(report.tokens) *
                                                        static_cast<double>(report.heads.size()) /
                                                        (1 << 20))));
  return out + "</section>\n";
}

HeatMap MapOf(const AuditReport& report, const Metric& metric, const char* title, const char* note,
              const char* cell_form, const char* cell_form_wide) {
  HeatMap map{
      .title = title, .note = note, .layers = report.shape.layers, .heads = report.shape.kv_heads};
  const bool wide = report.shape.kv_heads <= 5;
  for (const HeadAudit& head : report.heads) {
    map.values.push_back(metric.of(head));
    map.cells.push_back(Format(wide ? cell_form_wide : cell_form, metric.of(head)));
    map.hovers.push_back(HeadHover(report, head));
  }
  return map;
}

// Light at 1, dark at the worst value rounded down: at least 0.02 apart, so that noise stays light.
void ScaleDownFromOne(HeatMap& map) {
  const double worst = *std::min_element(map.values.begin(), map.values.end());
  const double step = worst > 0.9 ? 0.02 : worst > 0.7 ? 0.05 : 0.1;
  map.light = 1;
  map.dark = std::max(0.0, std::min(1 - step, std::floor(worst / step) * step));
  map.light_label = "1";
  map.dark_label = absl::StrFormat("%.2f", map.dark);
}

void ScaleUpFromZero(HeatMap& map, double least_range, bool percent) {
  const double worst = *std::max_element(map.values.begin(), map.values.end());
  const double step = worst > 1 ? 0.5 : worst > 0.2 ? 0.1 : worst > 0.05 ? 0.05 : 0.01;
  map.light = 0;
  map.dark = std::max(least_range, std::ceil(worst / step - 1e-9) * step);
  map.light_label = percent ? "0%" : "0";
  map.dark_label =
      percent ? absl::StrFormat("%.0f%%", 100 * map.dark) : absl::StrFormat("%g", map.dark);
}

std::string LeastEffortMap(const AuditReport& report) {
  HeatMap map{.title = absl::StrFormat("Effort for %g", *report.config.want_recall),
              .note = "least, by doubling",
              .hue = Hue::kOchre,
              .layers = report.shape.layers,
              .heads = report.shape.kv_heads};
  double least = INFINITY, most = -INFINITY;
  for (const HeadAudit& head : report.heads) {
    const double log2 = head.least.has_value() ? std::log2(std::max(1, head.least->effort)) : NAN;
    map.values.push_back(log2);
    if (std::isfinite(log2)) {
      least = std::min(least, log2);
      most = std::max(most, log2);
    }
    const std::string effort = !head.least.has_value()        ? "-"
                               : !HasEffort(head.params.kind) ? "flat"
                                                              : absl::StrCat(head.least->effort);
    map.cells.push_back(effort);
    map.hovers.push_back(head.least.has_value()
                             ? absl::StrFormat("%s\neffort %s%s: recall %.4f, %.0f us a search",
                                               HeadName(head), effort,
                                               head.least->scanned ? " (scans the zone)" : "",
                                               head.least->recall, head.least->search_us)
                             : absl::StrCat(HeadName(head), "\nno effort reaches it"));
  }
  if (!std::isfinite(least)) return HeatMapFigure(map);
  map.light = least;
  map.dark = std::max(most, least + 1);
  map.light_label = absl::StrFormat("%.0f", std::exp2(least));
  map.dark_label = absl::StrFormat("%.0f", std::exp2(map.dark));
  return HeatMapFigure(map);
}

std::string Maps(const AuditReport& report) {
  std::string out =
      "<section><h2>Per layer and head</h2><p class=\"lead\">Layers from top to bottom, KV heads "
      "from left to right. Light is as it should be; dark wants a look. Mass is also low, and the "
      "error "
      "against the whole zone high, where a head attends to everything a little: hover shows what "
      "the exact top rows come to.</p>"
      "<div class=\"maps\">\n";
  HeatMap recall = MapOf(report, kRecall, "Recall", "of the exact top rows", "2", "3");
  ScaleDownFromOne(recall);
  HeatMap mass = MapOf(report, kMass, "Mass", "on the rows found", "2", "3");
  ScaleDownFromOne(mass);
  HeatMap error = MapOf(report, kOutputError, "Output error", "against the whole zone", "2", "3");
  ScaleUpFromZero(error, 0.01, false);
  HeatMap to_exact =
      MapOf(report, kOutputErrorExact, "Error to exact", "against the exact rows", "2", "3");
  ScaleUpFromZero(to_exact, 0.01, false);
  HeatMap visited = MapOf(report, kVisitedShare, "Visited keys", "of exact search", "0", "%");
  visited.hue = Hue::kOchre;
  ScaleUpFromZero(visited, kCostScale, true);
  HeatMap time = MapOf(report, kTimeShare, "Time", "of exact search", "0", "%");
  time.hue = Hue::kOchre;
  ScaleUpFromZero(time, kCostScale, true);
  for (const HeatMap& map : {recall, mass, error, to_exact, visited, time}) {
    absl::StrAppend(&out, HeatMapFigure(map));
  }
  const bool choice = std::any_of(report.heads.begin(), report.heads.end(),
                                  [](const HeadAudit& h) { return HasEffort(h.params.kind); });
  if (report.config.want_recall.has_value() && choice) {
    absl::StrAppend(&out, LeastEffortMap(report));
  }
  if (report.index_kind == "auto") {
    KindMap kinds{
        .title = "Index kind", .layers = report.shape.layers, .heads = report.shape.kv_heads};
    for (const HeadAudit& head : report.heads) {
      kinds.kinds.emplace_back(kvstore::IndexKindName(head.params.kind));
      kinds.hovers.push_back(absl::StrCat(
          HeadName(head), "\n", DescribeIndex(head.params, report.config.top_k, report.tokens)));
    }
    absl::StrAppend(&out, KindMapFigure(kinds));
  }
  return out + "</div></section>\n";
}

struct Axis {
  const char* name;
  double (*of)(const CurvePoint&);
};
struct Quality {
  const char* name;
  const char* what;
  double (*of)(const CurvePoint&);
  bool recall;  // upwards to 1; else an error, downwards
};

std::string PointHover(const std::string& whose, const CurvePoint& point) {
  return absl::StrFormat(
      "%s%s\nrecall %.4f, mass %.4f\noutput error %.4f, to exact %.4f\n%s keys visited a search "
      "(%.1f%%)\n%.3f ms per layer",
      whose, point.label.empty() ? "" : ", effort " + point.label, point.recall, point.mass,
      point.output_error, point.output_error_exact, Grouped(point.visited),
      100 * point.visited_share, point.ms_per_layer);
}

CurveLine LineOf(const std::string& name, const std::vector<CurvePoint>& points, const Axis& axis,
                 const Quality& quality, bool thin) {
  CurveLine line{.name = name, .thin = thin};
  for (const CurvePoint& point : points) {
    line.nodes.push_back({.x = axis.of(point),
                          .y = quality.of(point),
                          .label = thin ? "" : point.label,
                          .hover = PointHover(name, point),
                          .marked = point.judged && !thin});
  }
  return line;
}

CurveChart ChartOf(const AuditReport& report, const Axis& axis, const Quality& quality,
                   double exact_x) {
  CurveChart chart{.title = absl::StrCat(quality.name, " against ", axis.name),
                   .x_axis = axis.name,
                   .y_axis = quality.what};
  if (report.shape.layers <= kMostLayerLines) {
    for (int32_t layer = 0; layer < report.shape.layers; ++layer) {
      chart.lines.push_back(LineOf(absl::StrCat("layer ", layer),
                                   Curve(report, HeadsOfLayer(report, layer)), axis, quality,
                                   /*thin=*/true));
    }
  }
  chart.lines.push_back(
      LineOf("mean of all heads", Curve(report, report.heads), axis, quality, /*thin=*/false));
  chart.has_exact = true;
  chart.exact_x = exact_x;
  chart.exact_y = quality.recall ? 1 : 0;
  chart.exact_hover = absl::StrFormat(
      "exact search\noutput error of the exact top rows %.4f\n%s keys a search\n%.3f ms per layer",
      Mean(report.heads, kExactOutputError),
      Grouped(Mean(report.heads, {"", [](const HeadAudit& h) { return h.exact.visited; }, false})),
      SumMs(report.heads, kExactSearchUs) / report.shape.layers);
  double low = chart.exact_y, high = chart.exact_y;
  for (const CurveLine& line : chart.lines) {
    for (const CurveNode& node : line.nodes) {
      low = std::min(low, node.y);
      high = std::max(high, node.y);
    }
  }
  if (quality.recall) {
    const double step = low > 0.95 ? 0.01 : low > 0.8 ? 0.05 : 0.1;
    chart.y_low = std::max(0.0, std::floor((low - step / 4) / step) * step);
    chart.y_high = 1 + (1 - chart.y_low) * 0.04;
  } else {
    chart.y_low = 0;
    chart.y_high = std::max(high * 1.12, 1e-3);
  }
  const double range = chart.y_high - chart.y_low;
  chart.y_tick = [range](double y) {
    return absl::StrFormat("%.*f", range > 0.5 ? 1 : range > 0.04 ? 2 : range > 0.004 ? 3 : 4, y);
  };
  return chart;
}

std::string EffortWords(const AuditReport& report) {
  std::vector<std::string> words;
  for (const HeadAudit& head : report.heads) {
    const std::string word(EffortWord(head.params.kind));
    if (std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
  }
  return absl::StrJoin(words, ", ");
}

std::string Curves(const AuditReport& report) {
  static constexpr Axis kMs = {"ms per layer", [](const CurvePoint& p) { return p.ms_per_layer; }};
  static constexpr Axis kKeys = {"keys visited per search",
                                 [](const CurvePoint& p) { return p.visited; }};
  static constexpr Quality kFound = {"Recall", "share of the exact top rows found",
                                     [](const CurvePoint& p) { return p.recall; }, true};
  static constexpr Quality kError = {
      "Output error", "relative, against attention over the exact top rows",
      [](const CurvePoint& p) { return p.output_error_exact; }, false};
  const double exact_ms = SumMs(report.heads, kExactSearchUs) / report.shape.layers;
  const double exact_keys =
      Mean(report.heads, {"", [](const HeadAudit& h) { return h.exact.visited; }, false});
  std::string out = absl::StrCat(
      "<section><h2>Quality against cost</h2><p class=\"lead\">",
      report.steps.size() > 1
          ? absl::StrCat("Numbers along the line are efforts (", EscapeHtml(EffortWords(report)),
                         "). Blue: mean of all heads, ringed where it was judged above; grey: "
                         "single layers. Costs on a logarithmic scale.")
          : std::string("The index has no effort to choose: one point."),
      "</p><div class=\"curves\">\n");
  for (const Quality& quality : {kFound, kError}) {
    absl::StrAppend(&out, CurveFigure(ChartOf(report, kMs, quality, exact_ms)),
                    CurveFigure(ChartOf(report, kKeys, quality, exact_keys)));
  }
  return out + "</div></section>\n";
}

std::string WorstTable(const AuditReport& report) {
  std::vector<const HeadAudit*> order;
  for (const HeadAudit& head : report.heads) order.push_back(&head);
  std::stable_sort(order.begin(), order.end(), [](const HeadAudit* a, const HeadAudit* b) {
    return a->judged.recall < b->judged.recall;
  });
  order.resize(std::min(order.size(), kWorstHeads));
  const bool wanted = report.config.want_recall.has_value();
  std::string out = absl::StrFormat(
      "<section><h2>Heads with the lowest recall</h2><table><thead><tr><th>layer</th>"
      "<th>KV head</th><th class=\"text\">index</th><th>effort</th><th>recall</th>"
      "<th>worst query</th><th>mass</th><th>exact mass</th><th>worst q head</th>"
      "<th>output error</th><th>exact rows</th><th>to exact</th><th>visited keys</th>"
      "<th>us a search</th><th>exact us</th>%s</tr></thead><tbody>\n",
      wanted ? absl::StrFormat("<th>effort for %g</th>", *report.config.want_recall) : "");
  for (const HeadAudit* head : order) {
    const Measured& m = head->judged;
    const bool below = wanted && m.recall < *report.config.want_recall;
    absl::StrAppendFormat(
        &out,
        "<tr%s><td>%d</td><td>%d</td><td class=\"text\">%s</td><td>%s</td><td><b>%.4f</b></td>"
        "<td>%.4f</td><td>%.4f</td><td>%.4f</td><td>%.4f</td><td>%.4f</td><td>%.4f</td><td>%.4f"
        "</td><td>%s</td><td>%.0f</td><td>%.0f</td>",
        below ? " class=\"below\"" : "", head->layer.value(), head->kv_head.value(),
        std::string(kvstore::IndexKindName(head->params.kind)),
        m.effort > 0 ? Grouped(m.effort) : "-", m.recall, m.recall_least, m.mass, head->exact.mass,
        m.mass_least, m.output_error, head->exact.output_error, m.output_error_exact,
        Grouped(m.visited), m.search_us, head->exact.search_us);
    if (wanted) {
      absl::StrAppendFormat(&out, "<td>%s</td>",
                            !head->least.has_value()  ? "none"
                            : head->least->effort > 0 ? Grouped(head->least->effort)
                                                      : "-");
    }
    out += "</tr>\n";
  }
  out += "</tbody></table>\n";
  return out + "</section>\n";
}

std::string Row(const std::string& name, const std::string& text) {
  return absl::StrCat("<dt>", name, "</dt><dd>", text, "</dd>\n");
}

std::string Method(const AuditReport& report) {
  const AuditConfig& config = report.config;
  std::string out = "<section><h2>How it was measured</h2><dl>\n";
  absl::StrAppend(
      &out,
      Row("queries",
          absl::StrFormat("%d of %d stored per layer and q head, spread evenly over positions; %d "
                          "left out because their zone has under %d rows. Positions %s.",
                          report.positions.size(), report.stored_queries, report.small_zones,
                          kLeastZonePerTopK * config.top_k, absl::StrJoin(report.positions, ", "))),
      Row("zone",
          absl::StrFormat("rows [%d, min(position, %d)): each query searches only what it "
                          "could have seen, without the first %d and the last %d rows, "
                          "which a decoder holds itself",
                          config.sink, report.tokens - config.local, config.sink, config.local)),
      Row("recall", absl::StrFormat("share of the exact top %d rows by group score that the index "
                                    "returned",
                                    config.top_k)),
      Row("mass",
          "share of the softmax over the zone on the rows returned, mean over the q heads "
          "of the group; &ldquo;worst q head&rdquo; takes the least of them"),
      Row("output error",
          "&#8214;o &minus; r&#8214; / &#8214;r&#8214; per q head: o attends to the rows returned "
          "alone, r to the whole zone (or, &ldquo;to exact&rdquo;, to the exact top rows alone). A "
          "decoder adds sink, local and new rows, so its error is smaller"),
      Row("visited keys",
          "what the index compared, added up over the q heads of the group; for "
          "code, reading a key&#39;s code counts as one"),
      Row("time",
          absl::StrFormat(
              "CPU time of one search, which is on one thread; median over the queries, rows and "
              "index in memory, %d %s measured at a time",
              report.threads, report.threads == 1 ? "head was" : "heads were")));
  if (report.built_from_queries) {
    absl::StrAppend(
        &out, Row("mind",
                  "the index was built from the stored queries, or chosen with them: on these it "
                  "does better than on others"));
  }
  absl::StrAppend(
      &out, Row("program",
                absl::StrFormat(
                    "carrel %s, %.1f s of measuring, page written %s", kVersion, report.seconds,
                    absl::FormatTime("%Y-%m-%d %H:%M UTC", absl::Now(), absl::UTCTimeZone()))));
  return out + "</dl></section>\n";
}

}  // namespace

std::string HtmlReport(const AuditReport& report) {
  return absl::StrCat(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
      "<title>Audit of ",
      EscapeHtml(report.context), "</title>\n<style>", kPageStyle,
      "</style></head>\n<body><main>\n", Header(report), Verdict(report), KeyFigures(report),
      Maps(report), Curves(report), WorstTable(report), Method(report), "</main>\n<script>",
      kPageScript, "</script></body></html>\n");
}

}  // namespace carrel::audit
