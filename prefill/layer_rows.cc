#include "prefill/layer_rows.h"

#include <algorithm>

namespace carrel::prefill {

std::vector<Position> SamplePositions(int64_t tokens, int64_t samples) {
  samples = std::min(samples, tokens);
  std::vector<Position> positions(static_cast<size_t>(samples));
  for (int64_t i = 0; i < samples; ++i) positions[i] = (2 * i + 1) * tokens / (2 * samples);
  return positions;
}

}  // namespace carrel::prefill
