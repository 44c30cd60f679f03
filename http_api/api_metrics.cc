#include "http_api/api_metrics.h"

#include <utility>
#include <vector>

#include "common/metric_family.h"
#include "kvstore/service/metrics_text.h"

namespace carrel::http_api {

void CountRequest(absl::string_view route, const absl::Status& status) {
  CounterOf("carrel_api_requests_total", "Requests, by what they are for and what became of them.",
            {{"route", std::string(route)}, {"status", absl::StatusCodeToString(status.code())}})
      .Add();
}

void CountAnswer(absl::string_view finish, const Usage& usage, const Figures& figures) {
  CounterOf("carrel_api_answers_total", "Answers that were begun, by how they ended.",
            {{"finish", std::string(finish)}})
      .Add();
  if (!figures.plan.empty()) {
    CounterOf("carrel_api_planned_answers_total",
              "Answers from contexts, by how these were attended to (inspect --plan).",
              {{"plan", figures.plan}})
        .Add();
  }
  const auto tokens = [](const char* kind, int64_t count) {
    CounterOf("carrel_api_tokens_total",
              "Tokens of prompts: read, or had from a context or the last turn; and of answers.",
              {{"kind", kind}})
        .Add(count);
  };
  tokens("read", usage.prompt_tokens - usage.cached_tokens);
  tokens("context", usage.cached_tokens);
  tokens("answer", usage.completion_tokens);
  if (usage.completion_tokens == 0) return;
  HistogramOf("carrel_api_first_token_seconds",
              "From when an answer's turn came until its first token.")
      .Add(1e3 * figures.prompt_ms);
  if (usage.completion_tokens == 1) return;
  HistogramOf("carrel_api_token_seconds", "Mean time of a token, of an answer's others.")
      .Add(1e3 * figures.ms_per_token);
}

std::string ApiMetricsText(const ApiGauges& gauges, std::vector<MetricFamily> more) {
  std::vector<MetricFamily> families = SnapshotMetrics();
  const auto gauge = [&](const char* name, const char* help, int64_t value) {
    families.push_back(GaugeFamily(name, help, value));
  };
  gauge("carrel_api_connections", "Connections that are open.", gauges.connections);
  gauge("carrel_api_connections_evicted",
        "Connections that were closed for newer ones, as they kept the server waiting longest.",
        gauges.connections_evicted);
  gauge("carrel_api_clients_slow", "Clients that were left, as they did not read their stream.",
        gauges.clients_slow);
  gauge("carrel_api_bytes_held", "Bytes of requests and replies that are held for clients.",
        gauges.bytes_held);
  gauge("carrel_api_bytes_refused", "Times that no room was left for bytes of clients.",
        gauges.bytes_refused);
  gauge("carrel_api_answers_waiting", "Answers that wait for their turn.", gauges.answers_waiting);
  gauge("carrel_api_answers_running", "Answers on their way.", gauges.answers_running);
  gauge("carrel_api_documents_waiting", "Documents that wait to be read.",
        gauges.documents_waiting);
  gauge("carrel_api_sequences_in_memory", "Conversations that wait for their next turn in memory.",
        gauges.sequences_in_memory);
  gauge("carrel_api_sequences_in_files", "Conversations that wait for their next turn in a file.",
        gauges.sequences_in_files);
  for (MetricFamily& family : more) families.push_back(std::move(family));
  for (MetricFamily& family : kvstore::ProcessMetrics()) families.push_back(std::move(family));
  return kvstore::MetricsText(families);
}

}  // namespace carrel::http_api
