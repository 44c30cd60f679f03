// What: a job for people, and as JSON.
#pragma once

#include <string>

#include "nlohmann/json_fwd.hpp"
#include "serving/jobs/job.h"

namespace carrel::tools {

nlohmann::json JsonOfJob(const serving::JobStatus& status);
// A line of a list.
std::string LineOfJob(const serving::JobStatus& status);
// All that is known, a few lines.
std::string DescribeJob(const serving::JobStatus& status);

}  // namespace carrel::tools
