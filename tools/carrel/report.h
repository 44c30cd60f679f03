// What:   statistics of retrieval as JSON and as a table for people.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "decoder/decoder.h"
#include "decoder/plan/plan.h"
#include "decoder/statistics.h"
#include "serving/runner.h"

namespace carrel::tools {

// part / whole; of nothing: 0.
template <typename Number>
double Ratio(Number part, int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

// measured: whether hit rate and mass were asked for; without, they are absent.
nlohmann::json StatisticsJson(const decoder::Statistics& statistics, bool measured);
std::string StatisticsTable(const decoder::Statistics& statistics, bool measured);

// Each way with its time, error and memory, or why it cannot be taken; taken: that of the plan.
nlohmann::json PlanJson(const decoder::Plan& plan);

// One line: plan, rows of the context per token, layer and KV head, times.
std::string AnswerLine(const serving::OpenedContext& context, const decoder::Statistics& statistics,
                       const decoder::GenerateResult& result, int32_t kv_heads,
                       int64_t prompt_tokens);

const char* StopReasonName(decoder::StopReason reason);  // "eos", "max_tokens", "context_length"

}  // namespace carrel::tools
