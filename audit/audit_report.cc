#include "audit/audit_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "audit/efforts.h"
#include "audit/summary.h"
#include "common/version.h"
#include "kvstore/index/index_spec.h"
#include "kvstore/index/index_type.h"

namespace carrel::audit {
namespace {

using nlohmann::json;

constexpr const Metric* kMetrics[] = {
    &kRecall,  &kMass,         &kMassLeast, &kExactMass,     &kOutputError,      &kOutputErrorExact,
    &kVisited, &kVisitedShare, &kSearchUs,  &kExactSearchUs, &kExactOutputError,
};

json IndexJson(const kvstore::IndexParams& params, int64_t top_k, int64_t rows) {
  const kvstore::IndexType& type = kvstore::IndexTypeOf(params.kind);
  json index = {{"kind", type.name()}};
  if (type.exact()) return index;
  for (const kvstore::IndexField& field : type.Fields(params)) {
    index[field.name] = field.word.empty() ? json(field.value) : json(field.word);
  }
  index["effort"] = OwnEffort(params, top_k, rows);
  return index;
}

json MeasuredJson(const Measured& m) {
  return {{"effort", m.effort},
          {"recall", m.recall},
          {"recall_least", m.recall_least},
          {"mass", m.mass},
          {"mass_least", m.mass_least},
          {"output_error", m.output_error},
          {"output_error_to_exact", m.output_error_exact},
          {"visited", m.visited},
          {"visited_share", m.visited_share},
          {"search_us", m.search_us},
          {"scanned", m.scanned}};
}

json HeadJson(const AuditReport& report, const HeadAudit& head) {
  json out = {{"layer", head.layer.value()},
              {"kv_head", head.kv_head.value()},
              {"index", IndexJson(head.params, report.config.top_k, report.tokens)},
              {"index_bytes", head.index_bytes},
              {"exact",
               {{"mass", head.exact.mass},
                {"mass_least", head.exact.mass_least},
                {"output_error", head.exact.output_error},
                {"visited", head.exact.visited},
                {"search_us", head.exact.search_us}}},
              {"measured", MeasuredJson(head.judged)}};
  json curve = json::array();
  for (const Measured& measured : head.curve) curve.push_back(MeasuredJson(measured));
  out["curve"] = std::move(curve);
  if (head.term.has_value()) {
    out["estimation_term"] = {{"counted", head.term->counted},
                              {"spread_share", head.term->spread_share},
                              {"rows", head.term->rows},
                              {"error", head.term->error},
                              {"error_without", head.term->error_without}};
  }
  if (report.config.want_recall.has_value()) {
    out["least_effort"] = head.least.has_value() ? MeasuredJson(*head.least) : json();
  }
  return out;
}

json SummaryJson(const AuditReport& report, Heads heads) {
  json out;
  for (const Metric* metric : kMetrics) {
    const HeadAudit& worst = Worst(heads, *metric);
    out[metric->key] = {{"mean", Mean(heads, *metric)},
                        {"worst", metric->of(worst)},
                        {"worst_layer", worst.layer.value()},
                        {"worst_kv_head", worst.kv_head.value()}};
  }
  out["ms"] = SumMs(heads, kSearchUs);
  out["exact_ms"] = SumMs(heads, kExactSearchUs);
  json curve = json::array();
  const std::vector<CurvePoint> points = Curve(report, heads);
  for (size_t i = 0; i < points.size(); ++i) {
    const CurvePoint& point = points[i];
    const Step& step = report.steps[i];
    curve.push_back({{"effort", step.effort > 0 ? json(step.effort) : json()},
                     {"factor", step.factor > 0 ? json(step.factor) : json()},
                     {"measured", point.judged},
                     {"recall", point.recall},
                     {"mass", point.mass},
                     {"output_error", point.output_error},
                     {"output_error_to_exact", point.output_error_exact},
                     {"visited", point.visited},
                     {"visited_share", point.visited_share},
                     {"ms_per_layer", point.ms_per_layer}});
  }
  out["curve"] = std::move(curve);
  return out;
}

std::string Name(const HeadAudit& head) {
  return absl::StrFormat("%d.%d", head.layer.value(), head.kv_head.value());
}

std::string QualityColumns(const AuditReport& report, Heads heads) {
  std::string row;
  for (const Metric* metric : {&kRecall, &kMass}) {
    const HeadAudit& worst = Worst(heads, *metric);
    absl::StrAppendFormat(&row, " %6.4f %6.4f %-6s", Mean(heads, *metric), metric->of(worst),
                          Name(worst));
  }
  const HeadAudit& worst_error = Worst(heads, kOutputError);
  absl::StrAppendFormat(&row, " %6.4f %6.4f %6.4f %-6s %6.4f %6.4f", Mean(heads, kExactMass),
                        Mean(heads, kOutputError), kOutputError.of(worst_error), Name(worst_error),
                        Mean(heads, kExactOutputError), Mean(heads, kOutputErrorExact));
  absl::StrAppendFormat(&row, " %9.0f %6.1f%% %8.0f %8.0f", Mean(heads, kVisited),
                        100 * Mean(heads, kVisitedShare), Mean(heads, kSearchUs),
                        Mean(heads, kExactSearchUs));
  if (report.index_kind == kvstore::kAutoIndexKind) {
    row += " ";
    for (const HeadAudit& head : heads) {
      if (heads.size() == report.heads.size()) break;
      absl::StrAppend(&row, " ", kvstore::IndexKindName(head.params.kind));
    }
  }
  return row + "\n";
}

void AppendQueries(const AuditReport& report, std::string& out) {
  const AuditConfig& config = report.config;
  absl::StrAppendFormat(&out,
                        "top %d of [%d, min(position, %d)); %d of %d stored queries per layer and "
                        "head, %d left out (zone under %d rows)\npositions",
                        config.top_k, config.sink, report.tokens - config.local,
                        report.positions.size(), report.stored_queries, report.small_zones,
                        kLeastZonePerTopK * config.top_k);
  for (const Position position : report.positions) absl::StrAppend(&out, " ", position);
  out += "\n";
  if (report.built_from_queries) {
    out +=
        "the index was built from the stored queries, or chosen with them: on these it does better "
        "than on others\n";
  }
}

void AppendCurve(const AuditReport& report, std::string& out) {
  const std::vector<CurvePoint> curve = Curve(report, report.heads);
  if (curve.size() < 2) return;
  absl::StrAppendFormat(&out, "\n%9s %6s %6s %7s %8s %9s %8s %12s\n", "effort", "recall", "mass",
                        "error", "to exact", "visited", "share", "ms per layer");
  for (const CurvePoint& point : curve) {
    absl::StrAppendFormat(&out, "%9s %6.4f %6.4f %7.4f %8.4f %9.0f %7.1f%% %12.3f%s\n", point.label,
                          point.recall, point.mass, point.output_error, point.output_error_exact,
                          point.visited, 100 * point.visited_share, point.ms_per_layer,
                          point.judged ? "  *" : "");
  }
  absl::StrAppendFormat(&out, "%9s %6.4f %6.4f %7.4f %8.4f %9s %8s %12.3f\n", "exact", 1.0,
                        Mean(report.heads, kExactMass), Mean(report.heads, kExactOutputError), 0.0,
                        "", "", SumMs(report.heads, kExactSearchUs) / report.shape.layers);
}

void AppendTerm(const AuditReport& report, std::string& out) {
  int64_t measured = 0, counted = 0, rows = 0;
  double share = 0, most = 0, with = 0, without = 0;
  for (const HeadAudit& head : report.heads) {
    if (!head.term.has_value()) continue;
    ++measured;
    rows = head.term->rows;
    with += head.term->error * head.term->error;
    without += head.term->error_without * head.term->error_without;
    if (!head.term->counted) continue;
    ++counted;
    share += head.term->spread_share;
    most = std::max(most, head.term->spread_share);
  }
  if (measured == 0) {
    out += "\nestimation term: not measured (carrel reindex does)\n";
    return;
  }
  absl::StrAppendFormat(&out,
                        "\nestimation term at %d rows, as prefill measured it: error %.4f with it, "
                        "%.4f without; counted in %d of %d heads, with %.2f of their spread "
                        "(at most %.2f)\n",
                        rows, std::sqrt(with / static_cast<double>(measured)),
                        std::sqrt(without / static_cast<double>(measured)), counted, measured,
                        counted == 0 ? 0 : share / static_cast<double>(counted), most);
}

void AppendWanted(const AuditReport& report, std::string& out) {
  if (!report.config.want_recall.has_value()) return;
  absl::StrAppendFormat(&out,
                        "\nleast effort (by doubling) for recall %g, by layer and kv_head; "
                        "+ scans the zone, - none reaches it\nlayer",
                        *report.config.want_recall);
  for (int32_t head = 0; head < report.shape.kv_heads; ++head) {
    absl::StrAppendFormat(&out, " %7d", head);
  }
  for (const HeadAudit& head : report.heads) {
    if (head.kv_head.value() == 0) absl::StrAppendFormat(&out, "\n%5d", head.layer.value());
    const std::string cell = !head.least.has_value() ? "-"
                             : HasEffort(head.params.kind)
                                 ? absl::StrCat(head.least->effort, head.least->scanned ? "+" : "")
                                 : "flat";
    absl::StrAppendFormat(&out, " %7s", cell);
  }
  const std::vector<const HeadAudit*> below = HeadsBelow(report);
  if (below.empty()) {
    absl::StrAppendFormat(&out, "\n\nall %d heads reach recall %g\n", report.heads.size(),
                          *report.config.want_recall);
  } else {
    absl::StrAppendFormat(&out, "\n\n%d of %d heads below recall %g\n", below.size(),
                          report.heads.size(), *report.config.want_recall);
  }
  for (const HeadAudit* head : below) {
    absl::StrAppendFormat(&out,
                          "  layer %d kv_head %d: recall %.4f at effort %d, worst query %.4f\n",
                          head->layer.value(), head->kv_head.value(), head->judged.recall,
                          head->judged.effort, head->judged.recall_least);
  }
}

}  // namespace

json AuditJson(const AuditReport& report) {
  const AuditConfig& config = report.config;
  json layers = json::array(), heads = json::array();
  for (int32_t layer = 0; layer < report.shape.layers; ++layer) {
    json summary = SummaryJson(report, HeadsOfLayer(report, layer));
    summary["layer"] = layer;
    layers.push_back(std::move(summary));
  }
  for (const HeadAudit& head : report.heads) heads.push_back(HeadJson(report, head));
  json out = {{"context", report.context},
              {"tokens", report.tokens},
              {"layers", report.shape.layers},
              {"q_heads", report.shape.q_heads},
              {"kv_heads", report.shape.kv_heads},
              {"head_dim", report.shape.head_dim},
              {"index", report.index_kind},
              {"index_bytes_per_key", IndexBytesPerKey(report)},
              {"top_k", config.top_k},
              {"sink", config.sink},
              {"local", config.local},
              {"queries",
               {{"stored", report.stored_queries},
                {"small_zones", report.small_zones},
                {"used", report.positions.size()},
                {"positions", report.positions},
                {"built_the_index", report.built_from_queries}}},
              {"totals", SummaryJson(report, report.heads)},
              {"by_layer", std::move(layers)},
              {"heads", std::move(heads)},
              {"threads", report.threads},
              {"seconds", report.seconds},
              {"program_version", kVersion}};
  if (config.want_recall.has_value()) {
    json below = json::array();
    for (const HeadAudit* head : HeadsBelow(report)) {
      below.push_back({{"layer", head->layer.value()},
                       {"kv_head", head->kv_head.value()},
                       {"recall", head->judged.recall}});
    }
    out["want_recall"] = *config.want_recall;
    out["below"] = std::move(below);
  }
  return out;
}

std::string AuditTables(const AuditReport& report) {
  std::string out = absl::StrFormat(
      "%s: %d tokens, %d layers, %d KV heads of %d q heads, head_dim %d\nindex %s; %.1f bytes per "
      "key\n",
      report.context, report.tokens, report.shape.layers, report.shape.kv_heads,
      report.shape.group(), report.shape.head_dim, DescribeIndexes(report),
      IndexBytesPerKey(report));
  AppendQueries(report, out);
  absl::StrAppendFormat(&out, "\n%5s %-20s %-20s %6s %-20s %6s %6s %17s %8s %8s\n", "",
                        "recall  worst  head", "mass    worst  head", "exact",
                        "error   worst  head", "exact", "to", "visited  of exact", "search",
                        "exact");
  absl::StrAppendFormat(&out, "%-5s %-20s %-20s %6s %-20s %6s %6s %17s %8s %8s\n", "layer", "", "",
                        "mass", "", "error", "exact", "keys", "us", "us");
  for (int32_t layer = 0; layer < report.shape.layers; ++layer) {
    absl::StrAppendFormat(&out, "%5d%s", layer,
                          QualityColumns(report, HeadsOfLayer(report, layer)));
  }
  absl::StrAppend(&out, "  all", QualityColumns(report, report.heads));
  absl::StrAppendFormat(&out, "\nper token, one thread: %.2f ms, exact search %.2f ms\n",
                        SumMs(report.heads, kSearchUs), SumMs(report.heads, kExactSearchUs));
  AppendTerm(report, out);
  AppendCurve(report, out);
  AppendWanted(report, out);
  return out;
}

}  // namespace carrel::audit
