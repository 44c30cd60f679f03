#include "kvstore/engine/request_metrics.h"

#include <array>
#include <string>

#include "absl/status/status.h"
#include "common/metrics.h"
#include "kvstore/format/crc_metrics.h"
#include "kvstore/index/index.h"
#include "kvstore/index/index_spec.h"

namespace carrel::kvstore {
namespace {

struct Series {
  Histogram* queued;
  Histogram* searched;
  Counter* rows;
};

// Manifests are files: what they call their index is looked up among the names there are.
constexpr int kIndexNames = static_cast<int>(std::size(kAllIndexKinds)) + 2;

absl::string_view IndexName(int i) {
  constexpr int kKinds = static_cast<int>(std::size(kAllIndexKinds));
  if (i < kKinds) return IndexKindName(kAllIndexKinds[i]);
  return i == kKinds ? kAutoIndexKind : "none";
}

using Table = std::array<std::array<Series, kIndexNames>, kRequestKinds>;

const Table& AllSeries() {
  static const Table* const all = [] {
    auto* table = new Table;
    for (int kind = 0; kind < kRequestKinds; ++kind) {
      for (int index = 0; index < kIndexNames; ++index) {
        const MetricLabels labels = {{"want", kRequestKindNames[kind]},
                                     {"index", std::string(IndexName(index))}};
        (*table)[kind][index] = {
            &HistogramOf("carrel_request_queued_seconds",
                         "From a request's acceptance until a thread starts on it.", labels),
            &HistogramOf("carrel_request_searched_seconds",
                         "From a thread's start on a request until its reply can be sent.", labels),
            &CounterOf("carrel_rows_selected_total", "Rows that queries selected, over KV heads.",
                       labels)};
      }
    }
    return table;
  }();
  return *all;
}

Counter& Refusals(absl::string_view reason) {
  return CounterOf("carrel_refusals_total",
                   "Requests and sessions that a limit or a right turned away.",
                   {{"reason", std::string(reason)}});
}

Counter& Errors(absl::string_view code) {
  return CounterOf("carrel_errors_total", "Requests and sessions that ended with an error.",
                   {{"code", std::string(code)}});
}

Counter& ImportsRemoved() {
  return CounterOf("carrel_abandoned_imports_removed_total",
                   "What interrupted imports left, removed for its age.");
}

}  // namespace

void DeclareMetrics() {
  (void)AllSeries();
  (void)CrcFailures();
  (void)ImportsRemoved();
  for (const char* reason :
       {"queue", "sessions", "in_flight", "result_bytes", "open_contexts", "transfers"}) {
    (void)Refusals(reason);
  }
  for (const auto code :
       {absl::StatusCode::kDataLoss, absl::StatusCode::kInternal,
        absl::StatusCode::kInvalidArgument, absl::StatusCode::kNotFound,
        absl::StatusCode::kFailedPrecondition, absl::StatusCode::kUnavailable,
        absl::StatusCode::kResourceExhausted, absl::StatusCode::kDeadlineExceeded}) {
    (void)Errors(absl::StatusCodeToString(code));
  }
}

int IndexSeries(absl::string_view index) {
  int i = 0;
  while (i + 1 < kIndexNames && IndexName(i) != index) ++i;
  return i;
}

void CountAnswer(RequestLatencies& latencies, RequestKind kind, int index_series,
                 absl::Duration queued, absl::Duration searched, int64_t rows) {
  const auto i = static_cast<size_t>(kind);
  const Series& series = AllSeries()[i][static_cast<size_t>(index_series)];
  const double queued_us = absl::ToDoubleMicroseconds(queued);
  const double searched_us = absl::ToDoubleMicroseconds(searched);
  for (Histogram* to : {series.queued, &latencies.queued[i]}) to->Add(queued_us);
  for (Histogram* to : {series.searched, &latencies.searched[i]}) to->Add(searched_us);
  series.rows->Add(rows);
}

void CountRefusal(absl::string_view reason) { Refusals(reason).Add(); }

void CountError(absl::string_view code) { Errors(code).Add(); }

void CountImportsRemoved(int64_t imports) { ImportsRemoved().Add(imports); }

}  // namespace carrel::kvstore
