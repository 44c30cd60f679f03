#include "library/sources.h"

#include <algorithm>

namespace carrel::library {
namespace {

std::vector<double> WeighPassages(const DocumentText& document,
                                  absl::Span<const decoder::AttendedRow> rows,
                                  absl::Span<const TokenId> answer) {
  std::vector<double> weights(document.passages().size(), 0.0);
  for (const decoder::AttendedRow& row : rows) {
    const int64_t passage = document.PassageOf(row.position);
    if (passage < 0) continue;  // what stands before the text: every head looks there
    const auto step = static_cast<size_t>(row.step);
    const bool copied = step < answer.size() &&
                        document.tokens()[static_cast<size_t>(row.position)] == answer[step];
    weights[static_cast<size_t>(passage)] += double{row.share} * row.share * (copied ? kCopied : 1);
  }
  return weights;
}

}  // namespace

std::vector<Source> FindSources(const DocumentText& document,
                                absl::Span<const decoder::AttendedRow> rows,
                                absl::Span<const TokenId> answer, int64_t most) {
  const std::vector<double> weights = WeighPassages(document, rows, answer);
  double total = 0;
  std::vector<int64_t> best;  // of passages
  for (size_t i = 0; i < weights.size(); ++i) {
    total += weights[i];
    if (weights[i] > 0) best.push_back(static_cast<int64_t>(i));
  }
  std::stable_sort(best.begin(), best.end(),
                   [&](int64_t a, int64_t b) { return weights[a] > weights[b]; });
  best.resize(std::min(best.size(), static_cast<size_t>(most)));
  std::sort(best.begin(), best.end());  // as they stand in the document
  std::vector<Source> sources;
  for (const int64_t passage : best) {
    const double share = weights[passage] / total;
    if (share < kLeastSource) continue;
    const RowRange range = document.passages()[static_cast<size_t>(passage)];
    if (!sources.empty() && sources.back().tokens.end == range.begin) {
      sources.back().tokens.end = range.end;
      sources.back().share += share;
    } else {
      sources.push_back({.tokens = range, .share = share});
    }
  }
  for (Source& source : sources) {
    source.begin = document.begin(source.tokens.begin);
    source.end = document.end(source.tokens.end - 1);
  }
  std::stable_sort(sources.begin(), sources.end(),
                   [](const Source& a, const Source& b) { return a.share > b.share; });
  return sources;
}

}  // namespace carrel::library
