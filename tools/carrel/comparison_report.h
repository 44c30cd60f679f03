// What:   a comparison as JSON, as a Markdown table, and as one self-contained page with curves.
// Edge:   without dense answers in the questions, agreement shows as "-" (null in JSON).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/carrel/comparison.h"

namespace carrel::tools {

nlohmann::json AnswersJson(const std::vector<Tally::Answer>& answers);
// Of so many questions: what is right, and how much.
nlohmann::json TallyJson(const Tally& tally, int64_t asked);
nlohmann::json ComparisonJson(const Comparison& comparison);
std::string ComparisonMarkdown(const Comparison& comparison);
std::string ComparisonPage(const Comparison& comparison);

}  // namespace carrel::tools
