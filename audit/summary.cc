#include "audit/summary.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "audit/efforts.h"
#include "kvstore/index/index_type.h"

namespace carrel::audit {

using kvstore::IndexKind;

Heads HeadsOfLayer(const AuditReport& report, int32_t layer) {
  const auto heads = static_cast<size_t>(report.shape.kv_heads);
  return Heads(report.heads).subspan(static_cast<size_t>(layer) * heads, heads);
}

double Mean(Heads heads, const Metric& metric) {
  double sum = 0;
  for (const HeadAudit& head : heads) sum += metric.of(head);
  return sum / static_cast<double>(heads.size());
}

const HeadAudit& Worst(Heads heads, const Metric& metric) {
  return *std::min_element(heads.begin(), heads.end(), [&](const HeadAudit& a, const HeadAudit& b) {
    return metric.larger_is_better ? metric.of(a) < metric.of(b) : metric.of(a) > metric.of(b);
  });
}

double SumMs(Heads heads, const Metric& us_metric) {
  return Mean(heads, us_metric) * static_cast<double>(heads.size()) / 1000;
}

double IndexBytesPerKey(const AuditReport& report) {
  double bytes = 0;
  for (const HeadAudit& head : report.heads) bytes += static_cast<double>(head.index_bytes);
  return bytes / static_cast<double>(report.heads.size()) / static_cast<double>(report.tokens);
}

std::vector<const HeadAudit*> HeadsBelow(const AuditReport& report) {
  std::vector<const HeadAudit*> below;
  if (!report.config.want_recall.has_value()) return below;
  for (const HeadAudit& head : report.heads) {
    if (head.judged.recall < *report.config.want_recall) below.push_back(&head);
  }
  return below;
}

std::vector<CurvePoint> Curve(const AuditReport& report, Heads heads) {
  std::vector<CurvePoint> curve;
  const auto n = static_cast<double>(heads.size());
  for (size_t s = 0; s < report.steps.size(); ++s) {
    CurvePoint point{.judged = true};
    const Step& step = report.steps[s];
    // Under "auto" efforts of heads differ in kind, even where their numbers agree.
    const bool by_factor = report.index_kind == "auto" && step.factor > 0;
    point.label = step.effort > 0 && !by_factor ? absl::StrCat(step.effort)
                  : step.factor > 0             ? absl::StrCat("x", step.factor)
                                                : "";
    for (const HeadAudit& head : heads) {
      const Measured& measured = head.curve[s];
      point.judged = point.judged && measured.effort == head.judged.effort;
      point.recall += measured.recall / n;
      point.mass += measured.mass / n;
      point.output_error += measured.output_error / n;
      point.output_error_exact += measured.output_error_exact / n;
      point.visited += measured.visited / n;
      point.visited_share += measured.visited_share / n;
      point.ms_per_layer += measured.search_us / n * report.shape.kv_heads / 1000;
    }
    curve.push_back(std::move(point));
  }
  return curve;
}

std::string DescribeIndex(const kvstore::IndexParams& params, int64_t top_k, int64_t rows) {
  const kvstore::IndexType& type = kvstore::IndexTypeOf(params.kind);
  std::string text = absl::StrCat(type.name(), ": ", type.Describe(params));
  if (type.exact()) return text;
  return absl::StrCat(text, ", effort ", OwnEffort(params, top_k, rows), " (", type.effort_word(),
                      params.effort == 0 ? "; the kind's default)" : ")");
}

std::string DescribeIndexes(const AuditReport& report) {
  if (report.index_kind != "auto") {
    return DescribeIndex(report.heads.front().params, report.config.top_k, report.tokens);
  }
  std::map<std::string, int> heads_of;
  for (const HeadAudit& head : report.heads) {
    ++heads_of[std::string(kvstore::IndexKindName(head.params.kind))];
  }
  return absl::StrCat("auto: ",
                      absl::StrJoin(heads_of, ", ", [](std::string* out, const auto& kind) {
                        absl::StrAppend(out, kind.second, " heads ", kind.first);
                      }));
}

}  // namespace carrel::audit
