// What:   metrics in the text format that Prometheus scrapes, by prometheus-cpp.
// Edge:   histograms, which are kept in microseconds, come out in seconds.
// Threads: any.
#pragma once

#include <string>
#include <vector>

#include "carrel/v1/context.pb.h"
#include "common/metrics.h"
#include "kvstore/access/principal.h"
#include "kvstore/service/service_limits.h"

namespace carrel::kvstore {

std::string MetricsText(const std::vector<MetricFamily>& families);

// What an engine holds at this moment.
std::vector<MetricFamily> EngineMetrics(const v1::StatisticsResponse& statistics);
// What a server's connections and sessions did.
std::vector<MetricFamily> ServiceMetrics(const ServiceStatistics& statistics);
// What the kernel says of this process: resident memory by kind, page faults, descriptors, CPU
// seconds, start time; what it does not say is left out.
// One sample of each for a tenant.
std::vector<MetricFamily> TenantMetrics(const std::vector<TenantUse>& tenants);
std::vector<MetricFamily> ProcessMetrics();

}  // namespace carrel::kvstore
