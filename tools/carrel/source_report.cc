#include "tools/carrel/source_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/shown.h"

namespace carrel::tools {
namespace {

// White space becomes single spaces; at most so many bytes, of whole characters.
std::string OneLine(absl::string_view text, size_t most) {
  std::string line;
  for (const absl::string_view word :
       absl::StrSplit(text, absl::ByAnyChar(" \n\t\r"), absl::SkipEmpty())) {
    absl::StrAppend(&line, line.empty() ? "" : " ", word);
  }
  if (line.size() <= most) return line;
  while (most > 0 && (static_cast<unsigned char>(line[most]) & 0xc0) == 0x80) --most;
  return line.substr(0, most) + "..";
}

}  // namespace

std::string SourcesTable(absl::Span<const serving::AnswerSource> sources, int64_t columns) {
  if (sources.empty()) return "(no sources)\n";
  std::string table;
  for (size_t i = 0; i < sources.size(); ++i) {
    absl::StrAppendFormat(
        &table, "[%d] %2.0f%%  %s\n", static_cast<int>(i + 1), 100 * sources[i].share,
        Harmless(
            OneLine(sources[i].text, static_cast<size_t>(std::max<int64_t>(columns, 40) - 14))));
  }
  return table;
}

std::string Harmless(absl::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const char first = text.front();
    const size_t steering = first == '\n' || first == '\t' ? 0 : SteeringBytes(text);
    shown += steering > 0 ? '?' : first;
    text.remove_prefix(std::max<size_t>(1, steering));
  }
  return shown;
}

}  // namespace carrel::tools
