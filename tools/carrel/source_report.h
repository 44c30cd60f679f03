// What: the passages that an answer rests on, for people.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "serving/answer_job.h"

namespace carrel::tools {

// A line each: number, share, the beginning of the text.
std::string SourcesTable(absl::Span<const serving::AnswerSource> sources, int64_t columns);

// What models and documents say must not steer a terminal (common/shown.h): '?' in place of what does, but for
// ends of lines and tabs.
std::string Harmless(absl::string_view text);

}  // namespace carrel::tools
