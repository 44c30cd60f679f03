// What:   how much of what is right an answer has, where that is more than one text.
// Math:   pieces: the share of them that stand in the text. records: |A n B| / |A u B|, A the records of the text and
//         B those that are right, each counted once (intersection over union).
// Edge:   a piece stands in a text where neither a letter nor a digit touches it, ASCII letters of any case, whatever
//         else is said. A record is a JSON object without others inside, wherever it stands; two are equal if they have
//         the same names and values, case and white space at the ends ignored, and 7 is "7". What is no JSON, or is cut
//         off, is no record. No record and none right: 1.
// Cost:   linear in the text, times the pieces.
// Threads: reentrant.
#pragma once

#include <set>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "nlohmann/json_fwd.hpp"

namespace carrel::eval {

// Whether `piece`, which is not empty, stands in the text.
bool HasPiece(absl::string_view text, absl::string_view piece);

// pieces: at least one.
double PiecesFound(absl::string_view text, absl::Span<const std::string> pieces);

// Records as texts of which equal ones are equal.
using RecordSet = std::set<std::string>;

// Records of a text.
RecordSet RecordsIn(absl::string_view text);
// Records of JSON: the objects in it that have no other one inside.
RecordSet RecordsOf(const nlohmann::json& json);

double RecordOverlap(const RecordSet& found, const RecordSet& right);

}  // namespace carrel::eval
