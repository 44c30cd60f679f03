// What:   which passages of its document an answer rests on, by what its tokens attended to.
// Math:   a row counts share^2 for every token of the answer, layer and q head that gives it that share of
//         its attention, kCopied times if it holds the very token that the answer goes on with; a passage
//         weighs what its rows count. The square leaves heads that look everywhere without a voice: those
//         that retrieve put much on few rows. What stands before the document's text counts nothing.
// Source: decision 068, measured there; heads that copy are the "retrieval heads" of Wu et al., 2024.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "common/ids.h"
#include "decoder/sources/attended_rows.h"
#include "library/document_text.h"

namespace carrel::library {

inline constexpr double kCopied = 4;
inline constexpr double kLeastSource =
    0.01;  // of what all passages weigh; what has less is left out

struct Source {
  RowRange tokens;             // of the document
  int64_t begin = 0, end = 0;  // its bytes in DocumentText::text
  double share = 0;            // of what all passages weigh, in (0, 1]
};

// The `most` passages that weigh most, heaviest first; neighbours among them are one source.
// answer: its tokens.
std::vector<Source> FindSources(const DocumentText& document,
                                absl::Span<const decoder::AttendedRow> rows,
                                absl::Span<const TokenId> answer, int64_t most);

}  // namespace carrel::library
