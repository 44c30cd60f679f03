// What:   an audit's heads, summed up: means and worst heads per layer, and curves of quality
//         against cost. What tables, JSON and the page have in common.
// Units:  ms are of one thread: the medians of the heads' searches, added up.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "audit/audit.h"

namespace carrel::audit {

// A number of a head's judged effort; Worst() is by `larger_is_better`.
struct Metric {
  const char* key;  // as in JSON: "recall"
  double (*of)(const HeadAudit&);
  bool larger_is_better;
};

inline constexpr Metric kRecall = {"recall", [](const HeadAudit& h) { return h.judged.recall; },
                                   true};
inline constexpr Metric kMass = {"mass", [](const HeadAudit& h) { return h.judged.mass; }, true};
inline constexpr Metric kMassLeast = {"mass_least",
                                      [](const HeadAudit& h) { return h.judged.mass_least; }, true};
inline constexpr Metric kExactMass = {"exact_mass", [](const HeadAudit& h) { return h.exact.mass; },
                                      true};
inline constexpr Metric kOutputError = {
    "output_error", [](const HeadAudit& h) { return h.judged.output_error; }, false};
inline constexpr Metric kOutputErrorExact = {
    "output_error_to_exact", [](const HeadAudit& h) { return h.judged.output_error_exact; }, false};
inline constexpr Metric kExactOutputError = {
    "exact_output_error", [](const HeadAudit& h) { return h.exact.output_error; }, false};
inline constexpr Metric kVisited = {"visited", [](const HeadAudit& h) { return h.judged.visited; },
                                    false};
inline constexpr Metric kVisitedShare = {
    "visited_share", [](const HeadAudit& h) { return h.judged.visited_share; }, false};
inline constexpr Metric kSearchUs = {"search_us",
                                     [](const HeadAudit& h) { return h.judged.search_us; }, false};
inline constexpr Metric kExactSearchUs = {
    "exact_search_us", [](const HeadAudit& h) { return h.exact.search_us; }, false};
inline constexpr Metric kTimeShare = {
    "time_share", [](const HeadAudit& h) { return h.judged.search_us / h.exact.search_us; }, false};

using Heads = absl::Span<const HeadAudit>;

Heads HeadsOfLayer(const AuditReport& report, int32_t layer);
double Mean(Heads heads, const Metric& metric);
const HeadAudit& Worst(Heads heads, const Metric& metric);
double SumMs(Heads heads, const Metric& us_metric);

// Index bytes per key, over all heads.
double IndexBytesPerKey(const AuditReport& report);

// The heads below want_recall at the judged effort; none if no recall is wanted.
std::vector<const HeadAudit*> HeadsBelow(const AuditReport& report);

// Means over heads of one step.
struct CurvePoint {
  std::string label;  // "512", or "x2" where the heads' efforts differ
  bool judged = false;
  double recall = 0, mass = 0, output_error = 0, output_error_exact = 0;
  double visited = 0;        // per search
  double visited_share = 0;  // of exact search
  double ms_per_layer = 0;
};
std::vector<CurvePoint> Curve(const AuditReport& report, Heads heads);

// "code: 128 bits, random directions, effort 512 (rows scored exactly)".
std::string DescribeIndex(const kvstore::IndexParams& params, int64_t top_k, int64_t rows);
// Of the whole context; under "auto" how many heads use which kind.
std::string DescribeIndexes(const AuditReport& report);

}  // namespace carrel::audit
