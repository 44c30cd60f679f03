// What:   what lies in a replica's cache, and what comes and goes, as metrics.
#pragma once

#include <vector>

#include "common/metrics.h"
#include "kvstore/replica/residence.h"

namespace carrel::kvstore {

std::vector<MetricFamily> ResidenceMetrics(const ResidenceStatistics& statistics);

}  // namespace carrel::kvstore
