#include <algorithm>

#include "kernels/score/code_score/code_score.h"

namespace carrel::kernels {
namespace {

int32_t Total(const CodeTables& t, int64_t head, const uint8_t* block, int64_t key) {
  int32_t total = 0;
  for (int64_t plane = 0; plane < t.bits / 4; ++plane) {
    int nibble = 0;
    for (int64_t b = 0; b < 4; ++b) nibble |= CodeBit(block, key, 4 * plane + b) << b;
    total += t.entries[static_cast<size_t>((head * t.bits / 4 + plane) * 16 + nibble)];
  }
  return total;
}

}  // namespace

void RefCodeTotals(const CodeTables& t, const void* blocks, int64_t count, int16_t* totals,
                   int64_t stride) {
  const auto* block = static_cast<const uint8_t*>(blocks);
  for (int64_t j = 0; j < count * kCodeBlockKeys; ++j) {
    const uint8_t* at = block + j / kCodeBlockKeys * CodeBlockBytes(t.bits);
    for (int64_t h = 0; h < t.group; ++h) {
      totals[h * stride + j] = static_cast<int16_t>(Total(t, h, at, j % kCodeBlockKeys));
    }
  }
}

void RefCodeScore(const CodeTables& t, const void* blocks, int64_t count, int16_t* out) {
  const auto* block = static_cast<const uint8_t*>(blocks);
  for (int64_t j = 0; j < count * kCodeBlockKeys; ++j) {
    const uint8_t* at = block + j / kCodeBlockKeys * CodeBlockBytes(t.bits);
    int32_t best = INT16_MIN;
    for (int64_t h = 0; h < t.group; ++h) {
      const int32_t total = 8 * Total(t, h, at, j % kCodeBlockKeys);
      const int32_t scaled = (total * t.factor[static_cast<size_t>(h)] + (1 << 14)) >> 15;
      best = std::max(
          best, std::clamp<int32_t>(scaled + t.bias[static_cast<size_t>(h)], INT16_MIN, INT16_MAX));
    }
    out[j] = static_cast<int16_t>(best);
  }
}

int64_t RefAppendAbove(const int16_t* scores, int64_t begin, int64_t n, int16_t bar, uint32_t* out,
                       int64_t places, int64_t* written) {
  *written = 0;
  int64_t j = begin;
  for (; j < n && *written < places; ++j) {
    if (scores[j] > bar) out[(*written)++] = static_cast<uint32_t>(j);
  }
  return j;
}

}  // namespace carrel::kernels
