// What:   statistics of retrieval as JSON and as a table for people.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "decoder/decoder.h"
#include "decoder/statistics.h"

namespace carrel::tools {

// measured: whether hit rate and mass were asked for; without, they are absent.
nlohmann::json StatisticsJson(const decoder::Statistics& statistics, bool measured);
std::string StatisticsTable(const decoder::Statistics& statistics, bool measured);

const char* StopReasonName(decoder::StopReason reason);  // "eos", "max_tokens", "context_length"

}  // namespace carrel::tools
