#include "decoder/runner/batch.h"

namespace carrel::decoder {

std::vector<std::vector<size_t>> PartsOf(absl::Span<const Slice> batch,
                                         absl::Span<const size_t> order, int64_t most) {
  std::vector<std::vector<size_t>> parts;
  size_t open = 0;  // the part that the next slice may join, if there is one
  int64_t tokens = most;
  for (const size_t i : order) {
    const auto n = static_cast<int64_t>(batch[i].tokens.size());
    if (n > most || tokens + n > most) {
      parts.push_back({i});
      if (n > most) continue;
      open = parts.size() - 1;
      tokens = n;
    } else {
      parts[open].push_back(i);
      tokens += n;
    }
  }
  return parts;
}

}  // namespace carrel::decoder
