#include "eval/answer_score.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/json.h"

namespace carrel::eval {
namespace {

bool IsOfWord(char c) { return absl::ascii_isalnum(static_cast<unsigned char>(c)); }

std::string Folded(absl::string_view text) {
  return absl::AsciiStrToLower(absl::StripAsciiWhitespace(text));
}

// 7, 7.0 and "7" are one value.
std::string FoldedValue(const nlohmann::json& value) {
  const std::string text = Folded(value.is_string() ? value.get<std::string>() : DumpJson(value));
  int64_t whole = 0;
  double number = 0;
  if (absl::SimpleAtoi(text, &whole)) return absl::StrCat(whole);
  if (absl::SimpleAtod(text, &number) && number == std::trunc(number) && std::abs(number) < 1e15)
    return absl::StrCat(static_cast<int64_t>(number));
  return text;
}

void Collect(const nlohmann::json& json, RecordSet& records) {
  const auto holds_object = [](const nlohmann::json& value, const auto& again) -> bool {
    if (value.is_object()) return true;
    return value.is_array() && std::any_of(value.begin(), value.end(),
                                           [&](const auto& inner) { return again(inner, again); });
  };
  const bool is_record = json.is_object() && std::none_of(json.begin(), json.end(), [&](auto& v) {
                           return holds_object(v, holds_object);
                         });
  if (!is_record) {
    if (!json.is_structured()) return;
    for (const nlohmann::json& inner : json) Collect(inner, records);
    return;
  }
  nlohmann::json record = nlohmann::json::object();  // by name
  for (const auto& [name, value] : json.items()) record[Folded(name)] = FoldedValue(value);
  if (!record.empty()) records.insert(DumpJson(record));
}

}  // namespace

bool HasPiece(absl::string_view text, absl::string_view piece) {
  const std::string low_text = absl::AsciiStrToLower(text), low_piece = Folded(piece);
  for (size_t at = low_text.find(low_piece); at != std::string::npos;
       at = low_text.find(low_piece, at + 1)) {
    const size_t end = at + low_piece.size();
    if ((at == 0 || !IsOfWord(low_text[at - 1])) &&
        (end == low_text.size() || !IsOfWord(low_text[end]))) {
      return true;
    }
  }
  return false;
}

double PiecesFound(absl::string_view text, absl::Span<const std::string> pieces) {
  const auto found = std::count_if(pieces.begin(), pieces.end(),
                                   [&](const std::string& piece) { return HasPiece(text, piece); });
  return static_cast<double>(found) / static_cast<double>(pieces.size());
}

RecordSet RecordsOf(const nlohmann::json& json) {
  RecordSet records;
  Collect(json, records);
  return records;
}

RecordSet RecordsIn(absl::string_view text) {
  RecordSet records;
  size_t begin = absl::string_view::npos;  // of the innermost object that is open
  bool quoted = false;                     // inside a text of it
  for (size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (quoted) {
      if (c == '\\') ++at;
      if (c == '"') quoted = false;
    } else if (c == '{') {
      begin = at;
    } else if (begin == absl::string_view::npos) {
      continue;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '}') {
      const absl::StatusOr<nlohmann::json> json =
          ParseJson(text.substr(begin, at + 1 - begin), "an answer", kMessageBounds);
      if (json.ok()) Collect(*json, records);
      begin = absl::string_view::npos;
    }
  }
  return records;
}

double RecordOverlap(const RecordSet& found, const RecordSet& right) {
  const auto both = std::count_if(found.begin(), found.end(), [&](const std::string& record) {
    return right.contains(record);
  });
  const auto any = static_cast<double>(found.size() + right.size()) - static_cast<double>(both);
  return any == 0 ? 1 : static_cast<double>(both) / any;
}

}  // namespace carrel::eval
