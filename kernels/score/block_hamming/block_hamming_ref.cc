#include <cstddef>

#include "kernels/score/block_hamming/block_hamming.h"

namespace carrel::kernels {

void RefBlockHammingScore(const HammingTables& t, const void* blocks, int64_t count, int16_t* out) {
  const auto* block = static_cast<const uint8_t*>(blocks);
  for (int64_t j = 0; j < count * kCodeBlockKeys; ++j) {
    const uint8_t* at = block + j / kCodeBlockKeys * CodeBlockBytes(t.bits);
    int32_t total = 0;
    for (int64_t plane = 0; plane < t.bits / 4; ++plane) {
      int nibble = 0;
      for (int64_t b = 0; b < 4; ++b) {
        nibble |= CodeBit(at, j % kCodeBlockKeys, 4 * plane + b) << b;
      }
      total += t.entries[static_cast<size_t>(plane * 16 + nibble)];
    }
    out[j] = static_cast<int16_t>(total);
  }
}

}  // namespace carrel::kernels
