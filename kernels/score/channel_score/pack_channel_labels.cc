#include <algorithm>

#include "kernels/score/channel_score/channel_score.h"

namespace carrel::kernels {

void PackChannelLabels(const uint8_t* levels, int64_t rows, int64_t width, uint32_t* labels) {
  std::fill_n(labels, ChannelLabelStride(rows) / 8 * width, 0u);
  for (int64_t j = 0; j < rows; ++j) {
    for (int64_t c = 0; c < width; ++c) {
      const ChannelLabelPlace at = PlaceOfChannelLabel(j, width, c);
      labels[at.word] |= static_cast<uint32_t>(levels[j * width + c]) << at.shift;
    }
  }
}

}  // namespace carrel::kernels
