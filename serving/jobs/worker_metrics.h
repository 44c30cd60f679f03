// What:   what a worker did, and what waits for it, as metrics.
#pragma once

#include <vector>

#include "common/metrics.h"
#include "serving/jobs/worker.h"

namespace carrel::serving {

std::vector<MetricFamily> WorkerMetrics(const WorkerStatistics& statistics);

}  // namespace carrel::serving
