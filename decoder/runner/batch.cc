#include "decoder/runner/batch.h"

#include <algorithm>

namespace carrel::decoder {

std::vector<std::vector<size_t>> PartsOf(absl::Span<const Slice> batch,
                                         absl::Span<const size_t> order, int64_t most) {
  const auto tokens = [&](size_t i) { return static_cast<int64_t>(batch[i].tokens.size()); };
  std::vector<size_t> shortest_first(order.begin(), order.end());
  std::stable_sort(shortest_first.begin(), shortest_first.end(),
                   [&](size_t a, size_t b) { return tokens(a) < tokens(b); });
  std::vector<std::vector<size_t>> parts;
  int64_t room = 0;  // of the last part
  for (const size_t i : shortest_first) {
    if (parts.empty() || tokens(i) > room) {
      parts.emplace_back();
      room = most;
    }
    parts.back().push_back(i);
    room -= tokens(i);
  }
  return parts;
}

}  // namespace carrel::decoder
