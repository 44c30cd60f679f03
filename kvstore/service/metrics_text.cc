#include "kvstore/service/metrics_text.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "common/metric_family.h"
#include "common/version.h"

namespace carrel::kvstore {
namespace {

prometheus::ClientMetric ToPrometheus(const MetricFamily& family, const MetricSample& sample) {
  prometheus::ClientMetric metric;
  for (const auto& [name, value] : sample.labels) {
    prometheus::ClientMetric::Label label;
    label.name = name;
    label.value = value;
    metric.label.push_back(std::move(label));
  }
  switch (family.type) {
    case MetricType::kCounter:
      metric.counter.value = sample.value;
      break;
    case MetricType::kGauge:
      metric.gauge.value = sample.value;
      break;
    case MetricType::kHistogram:
      metric.histogram.sample_count = static_cast<uint64_t>(sample.buckets.count);
      metric.histogram.sample_sum = sample.buckets.sum_us * 1e-6;
      for (size_t i = 0; i < sample.buckets.cumulative.size(); ++i) {
        prometheus::ClientMetric::Bucket bucket;
        bucket.cumulative_count = static_cast<uint64_t>(sample.buckets.cumulative[i]);
        bucket.upper_bound = Histogram::Bounds()[i] * 1e-6;
        metric.histogram.bucket.push_back(bucket);
      }
      break;
  }
  return metric;
}

// By MetricType.
constexpr prometheus::MetricType kTypes[] = {prometheus::MetricType::Counter,
                                             prometheus::MetricType::Gauge,
                                             prometheus::MetricType::Histogram};

double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

// The resident set by what it is: heap and stacks, pages of files (rows, codes, the program), shared
// memory.
MetricFamily ResidentMemory() {
  MetricFamily family = {.name = "carrel_resident_memory_bytes",
                         .help = "Memory of this process that is in RAM, by what it holds.",
                         .type = MetricType::kGauge};
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    for (const auto& [field, kind] :
         {std::pair{"RssAnon:", "heap"}, std::pair{"RssFile:", "mapped"},
          std::pair{"RssShmem:", "shared"}}) {
      long long kib = 0;
      if (line.rfind(field, 0) != 0 ||
          std::sscanf(line.c_str() + std::strlen(field), "%lld", &kib) != 1) {
        continue;
      }
      family.samples.push_back(
          {.labels = {{"kind", kind}}, .value = static_cast<double>(kib) * 1024});
    }
  }
  return family;
}

}  // namespace

std::string MetricsText(const std::vector<MetricFamily>& families) {
  std::vector<prometheus::MetricFamily> converted;
  for (const MetricFamily& family : families) {
    prometheus::MetricFamily to;
    to.name = family.name;
    to.help = family.help;
    to.type = kTypes[static_cast<size_t>(family.type)];
    for (const MetricSample& sample : family.samples) {
      to.metric.push_back(ToPrometheus(family, sample));
    }
    converted.push_back(std::move(to));
  }
  return prometheus::TextSerializer().Serialize(converted);
}

std::vector<MetricFamily> EngineMetrics(const v1::StatisticsResponse& s) {
  return {
      GaugeFamily("carrel_sessions", "Sessions that are open.", s.sessions()),
      GaugeFamily("carrel_open_contexts", "Contexts that are open.", s.open_contexts()),
      GaugeFamily("carrel_queue_waiting", "Requests that wait for a thread.", s.waiting()),
      GaugeFamily("carrel_memory_budget_bytes", "What the process may hold by its configuration.",
                  s.memory_budget_bytes()),
      GaugeFamily("carrel_index_heap_bytes", "Heap of loaded indexes, and keys kept in 8 bits.",
                  s.index_bytes()),
      TotalFamily("carrel_index_loads_total", "Indexes loaded.", s.index_loads()),
      TotalFamily("carrel_index_evictions_total", "Indexes let go for the budget.",
                  s.index_evictions()),
      TotalFamily("carrel_layers_released_total", "Layers whose pages were let go for the budget.",
                  s.layers_released()),
      TotalFamily("carrel_files_changed_total",
                  "Times that a file of an open context was written to.", s.files_changed()),
      TotalFamily("carrel_files_damaged_total", "Files of open contexts that could not be read.",
                  s.files_damaged()),
      TotalFamily("carrel_scrubbed_bytes_total", "Stored bytes that the scrubber verified again.",
                  s.scrubbed_bytes()),
      TotalFamily("carrel_scrub_passes_total", "Passes of the scrubber over all contexts.",
                  s.scrub_passes()),
      TotalFamily("carrel_scrub_failures_total",
                  "Damaged files that the scrubber found, in each pass.", s.scrub_failures()),
      TotalFamily("carrel_layers_loaded_total", "Layers read whole behind the searches.",
                  s.layers_loaded()),
  };
}

std::vector<MetricFamily> ServiceMetrics(const ServiceStatistics& s) {
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  MetricFamily cut = {.name = "carrel_sessions_cut_total",
                      .help =
                          "Sessions that ran out of time (to open, to ask, to take replies), or "
                          "whose keys were withdrawn.",
                      .type = MetricType::kCounter};
  cut.samples = {{.labels = {{"reason", "not_opened"}}, .value = number(s.sessions_not_opened)},
                 {.labels = {{"reason", "idle"}}, .value = number(s.sessions_idle)},
                 {.labels = {{"reason", "stalled"}}, .value = number(s.sessions_stalled)},
                 {.labels = {{"reason", "withdrawn"}}, .value = number(s.sessions_withdrawn)}};
  return {
      GaugeFamily("carrel_connections", "Connections that are open.", s.connections),
      GaugeFamily("carrel_max_connections", "Connections that may be open.", s.max_connections),
      TotalFamily("carrel_connections_accepted_total", "Connections accepted.",
                  s.connections_accepted),
      TotalFamily("carrel_connections_refused_total", "Connections closed at once, for a limit.",
                  s.connections_refused),
      TotalFamily("carrel_connections_silent_total",
                  "Connections closed, as their clients said nothing.", s.connections_silent),
      TotalFamily("carrel_sessions_refused_total",
                  "Sessions refused at their start: a limit, or draining.", s.sessions_refused),
      std::move(cut),
      GaugeFamily("carrel_transfers", "Exports and imports that go on.", s.transfers),
  };
}

std::vector<MetricFamily> TenantMetrics(const std::vector<TenantUse>& tenants) {
  const struct {
    const char *name, *help;
    MetricType type;
    int64_t TenantUse::*value;
  } all[] = {
      {"carrel_tenant_sessions", "Sessions, exports and imports of a tenant that are open.",
       MetricType::kGauge, &TenantUse::sessions},
      {"carrel_tenant_imports", "Imports of a tenant that have a place in its quotas.",
       MetricType::kGauge, &TenantUse::imports},
      {"carrel_tenant_requests_total", "Requests and calls of a tenant.", MetricType::kCounter,
       &TenantUse::requests},
      {"carrel_tenant_bytes_total", "Bytes of a tenant's requests and replies.",
       MetricType::kCounter, &TenantUse::bytes},
      {"carrel_tenant_refusals_total", "Calls and sessions of a tenant that were denied.",
       MetricType::kCounter, &TenantUse::refusals},
      {"carrel_tenant_stored_contexts", "Contexts that a tenant has stored.", MetricType::kGauge,
       &TenantUse::stored_contexts},
      {"carrel_tenant_stored_bytes", "Bytes that a tenant has stored.", MetricType::kGauge,
       &TenantUse::stored_bytes},
  };
  std::vector<MetricFamily> families;
  for (const auto& one : all) {
    MetricFamily family = {.name = one.name, .help = one.help, .type = one.type};
    for (const TenantUse& tenant : tenants) {
      family.samples.push_back(
          {.labels = {{"tenant", tenant.name}}, .value = static_cast<double>(tenant.*one.value)});
    }
    families.push_back(std::move(family));
  }
  return families;
}

std::vector<MetricFamily> ProcessMetrics() {
  std::vector<MetricFamily> families;
  families.push_back({.name = "carrel_build_info",
                      .help = "The version that runs; always 1.",
                      .type = MetricType::kGauge,
                      .samples = {{.labels = {{"version", kVersion}}, .value = 1}}});
  if (MetricFamily memory = ResidentMemory(); !memory.samples.empty()) {
    families.push_back(std::move(memory));
  }
  rusage usage;
  if (getrusage(RUSAGE_SELF, &usage) == 0) {
    families.push_back(
        {.name = "carrel_page_faults_total",
         .help = "Pages that had to be brought in: from disk (major) or not (minor).",
         .type = MetricType::kCounter,
         .samples = {
             {.labels = {{"kind", "major"}}, .value = static_cast<double>(usage.ru_majflt)},
             {.labels = {{"kind", "minor"}}, .value = static_cast<double>(usage.ru_minflt)}}});
    families.push_back(TotalFamily("process_cpu_seconds_total", "CPU time of this process.",
                                   Seconds(usage.ru_utime) + Seconds(usage.ru_stime)));
  }
  std::error_code error;
  std::filesystem::directory_iterator descriptors("/proc/self/fd", error);
  if (!error) {
    // The one that reads the folder is among them.
    const auto open = std::distance(begin(descriptors), end(descriptors)) - 1;
    families.push_back(GaugeFamily("process_open_fds", "File descriptors that are open.",
                                   static_cast<double>(open)));
  }
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    families.push_back(GaugeFamily("process_max_fds", "File descriptors that may be open.",
                                   static_cast<double>(limit.rlim_cur)));
  }
  return families;
}

}  // namespace carrel::kvstore
