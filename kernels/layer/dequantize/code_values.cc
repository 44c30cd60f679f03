#include "kernels/layer/dequantize/code_values.h"

#include <cstring>

#include "common/status.h"

namespace carrel::kernels {
namespace {

constexpr int kLargestBlock = 256;

// Codes of one width that fill bytes [begin, end) of a block.
struct CodeField {
  int begin, end, bits;
};

// Where a type's codes lie: their low bits, and those above them, if they lie apart.
struct CodeLayout {
  GgufType type;
  CodeField low, high;
};

constexpr CodeLayout kLayouts[] = {
    {GgufType::kQ4_0, {2, 18, 4}, {0, 0, 0}},     {GgufType::kQ4_1, {4, 20, 4}, {0, 0, 0}},
    {GgufType::kQ5_0, {6, 22, 4}, {2, 6, 1}},     {GgufType::kQ5_1, {8, 24, 4}, {4, 8, 1}},
    {GgufType::kQ8_0, {2, 34, 8}, {0, 0, 0}},     {GgufType::kQ2_K, {16, 80, 2}, {0, 0, 0}},
    {GgufType::kQ3_K, {32, 96, 2}, {0, 32, 1}},   {GgufType::kQ4_K, {16, 144, 4}, {0, 0, 0}},
    {GgufType::kQ5_K, {48, 176, 4}, {16, 48, 1}}, {GgufType::kQ6_K, {0, 128, 4}, {128, 192, 2}},
    {GgufType::kIQ4_NL, {2, 18, 4}, {0, 0, 0}},   {GgufType::kIQ4_XS, {8, 136, 4}, {0, 0, 0}},
    {GgufType::kMxfp4, {1, 17, 4}, {0, 0, 0}},
};

const CodeLayout& LayoutOf(GgufType type) {
  for (const CodeLayout& layout : kLayouts) {
    if (layout.type == type) return layout;
  }
  CARREL_CHECK(!"a quantised type");
  return kLayouts[0];
}

// Every code of the field is the low bits of `code`.
void Fill(const CodeField& field, int code, uint8_t* block) {
  if (field.bits == 0) return;
  int byte = 0;
  for (int at = 0; at < 8; at += field.bits) byte |= (code & ((1 << field.bits) - 1)) << at;
  std::memset(block + field.begin, byte, static_cast<size_t>(field.end - field.begin));
}

}  // namespace

int CodeLevels(GgufType type) {
  const CodeLayout& layout = LayoutOf(type);
  return 1 << (layout.low.bits + layout.high.bits);
}

void CodeValues(GgufType type, const void* block, int level, float* out) {
  const CodeLayout& layout = LayoutOf(type);
  const GgufTypeTraits& traits = TraitsOf(type);
  CARREL_CHECK(level >= 0 && level < CodeLevels(type) && traits.block_bytes <= kLargestBlock);
  uint8_t filled[kLargestBlock];
  std::memcpy(filled, block, static_cast<size_t>(traits.block_bytes));
  Fill(layout.low, level, filled);
  Fill(layout.high, level >> layout.low.bits, filled);
  Dequantize(type, filled, traits.block_elements, out);
}

}  // namespace carrel::kernels
