#include "kernels/layer/dequantize/dequantize.h"

#include <cstring>

#include "common/dtype.h"
#include "common/status.h"
#include "kernels/layer/dequantize/steps.h"

namespace carrel::kernels {
namespace {

constexpr GgufTypeTraits kTypes[] = {
    {GgufType::kF32, "F32", 1, 4, false},          {GgufType::kF16, "F16", 1, 2, false},
    {GgufType::kBf16, "BF16", 1, 2, false},        {GgufType::kQ4_0, "Q4_0", 32, 18, true},
    {GgufType::kQ4_1, "Q4_1", 32, 20, true},       {GgufType::kQ5_0, "Q5_0", 32, 22, true},
    {GgufType::kQ5_1, "Q5_1", 32, 24, true},       {GgufType::kQ8_0, "Q8_0", 32, 34, true},
    {GgufType::kQ2_K, "Q2_K", 256, 84, true},      {GgufType::kQ3_K, "Q3_K", 256, 110, true},
    {GgufType::kQ4_K, "Q4_K", 256, 144, true},     {GgufType::kQ5_K, "Q5_K", 256, 176, true},
    {GgufType::kQ6_K, "Q6_K", 256, 210, true},     {GgufType::kIQ4_NL, "IQ4_NL", 32, 18, true},
    {GgufType::kIQ4_XS, "IQ4_XS", 256, 136, true}, {GgufType::kMxfp4, "MXFP4", 32, 17, true},
};

// Types that a file may name and that we do not run.
struct OtherType {
  uint32_t number;
  absl::string_view name;
};
constexpr OtherType kOthers[] = {
    {9, "Q8_1"},   {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"},
    {21, "IQ3_S"}, {22, "IQ2_S"}, {24, "I8"},      {25, "I16"},    {26, "I32"},     {27, "I64"},
    {28, "F64"},   {29, "IQ1_M"}, {34, "TQ1_0"},   {35, "TQ2_0"},  {40, "NVFP4"},   {41, "Q1_0"},
};

constexpr int kSmall = 32;   // elements of a plain block
constexpr int kLarge = 256;  // elements of a super-block

float Half(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return F16ToFloat(bits);
}

uint32_t Bits32(const uint8_t* at) {
  uint32_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return bits;
}

// Element i of 32 4-bit numbers: the low halves of 16 bytes, then the high halves.
int Nibble(const uint8_t* q, int i) { return i < 16 ? q[i] & 15 : q[i - 16] >> 4; }

void Q4_0(const uint8_t* b, float* out) {
  const float d = Half(b);
  for (int i = 0; i < kSmall; ++i) out[i] = d * static_cast<float>(Nibble(b + 2, i) - 8);
}

void Q4_1(const uint8_t* b, float* out) {
  const float d = Half(b), m = Half(b + 2);
  for (int i = 0; i < kSmall; ++i) out[i] = d * static_cast<float>(Nibble(b + 4, i)) + m;
}

void Q5_0(const uint8_t* b, float* out) {
  const float d = Half(b);
  const uint32_t high = Bits32(b + 2);
  for (int i = 0; i < kSmall; ++i) {
    const int q = Nibble(b + 6, i) | static_cast<int>(high >> i & 1) << 4;
    out[i] = d * static_cast<float>(q - 16);
  }
}

void Q5_1(const uint8_t* b, float* out) {
  const float d = Half(b), m = Half(b + 2);
  const uint32_t high = Bits32(b + 4);
  for (int i = 0; i < kSmall; ++i) {
    const int q = Nibble(b + 8, i) | static_cast<int>(high >> i & 1) << 4;
    out[i] = d * static_cast<float>(q) + m;
  }
}

void Q8_0(const uint8_t* b, float* out) {
  const float d = Half(b);
  for (int i = 0; i < kSmall; ++i) out[i] = d * static_cast<float>(static_cast<int8_t>(b[2 + i]));
}

// Element i of 256 2-bit numbers: each 32 bytes hold four runs of 32.
int Crumb(const uint8_t* q, int i) { return q[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3; }

// 16 scales and minima of 4 bits, 256 numbers of 2 bits, two halves.
void Q2_K(const uint8_t* b, float* out) {
  const float d = Half(b + 80), m = Half(b + 82);
  for (int i = 0; i < kLarge; ++i) {
    const uint8_t scale = b[i / 16];
    const float step = d * static_cast<float>(scale & 15);
    const float minimum = m * static_cast<float>(scale >> 4);
    out[i] = step * static_cast<float>(Crumb(b + 16, i)) - minimum;
  }
}

// 256 high bits (set: no 4 is taken off), 256 numbers of 2 bits, 16 scales of 6 bits, a half.
void Q3_K(const uint8_t* b, float* out) {
  const uint8_t* scales = b + 96;
  const float d = Half(b + 108);
  for (int i = 0; i < kLarge; ++i) {
    const int s = i / 16;
    const int low = s < 8 ? scales[s] & 15 : scales[s - 8] >> 4;
    const int high = scales[8 + s % 4] >> (s / 4 * 2) & 3;
    const int bit = b[i % 32] >> (i / 32) & 1;
    const int q = Crumb(b + 32, i) - (bit ? 0 : 4);
    const float step = d * static_cast<float>((low | high << 4) - 32);
    out[i] = step * static_cast<float>(q);
  }
}

// Scale and minimum s of 8, 6 bits each, packed into 12 bytes (Q4_K, Q5_K).
struct ScaleAndMinimum {
  int scale, minimum;
};
ScaleAndMinimum Unpack(const uint8_t* p, int s) {
  if (s < 4) return {p[s] & 63, p[s + 4] & 63};
  return {(p[s + 4] & 15) | (p[s - 4] >> 6) << 4, p[s + 4] >> 4 | (p[s] >> 6) << 4};
}

void Q4_K(const uint8_t* b, float* out) {
  const float d = Half(b), m = Half(b + 2);
  for (int s = 0; s < 8; ++s) {
    const ScaleAndMinimum packed = Unpack(b + 4, s);
    const float step = d * static_cast<float>(packed.scale);
    const float minimum = m * static_cast<float>(packed.minimum);
    const uint8_t* q = b + 16 + s / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      out[s * 32 + i] = step * static_cast<float>(q[i] >> (s % 2 * 4) & 15) - minimum;
    }
  }
}

void Q5_K(const uint8_t* b, float* out) {
  const float d = Half(b), m = Half(b + 2);
  for (int s = 0; s < 8; ++s) {
    const ScaleAndMinimum packed = Unpack(b + 4, s);
    const float step = d * static_cast<float>(packed.scale);
    const float minimum = m * static_cast<float>(packed.minimum);
    const uint8_t* high = b + 16;
    const uint8_t* q = b + 48 + s / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      const int value = (q[i] >> (s % 2 * 4) & 15) | (high[i] >> s & 1) << 4;
      out[s * 32 + i] = step * static_cast<float>(value) - minimum;
    }
  }
}

void Q6_K(const uint8_t* b, float* out) {
  const uint8_t* high = b + 128;
  const uint8_t* scales = b + 192;
  const float d = Half(b + 208);
  for (int i = 0; i < kLarge; ++i) {
    const int half = i / 128, in_half = i % 128;
    const int low = b[half * 64 + in_half % 64] >> (in_half / 64 * 4) & 15;
    const int q = (low | (high[half * 32 + i % 32] >> (in_half / 32 * 2) & 3) << 4) - 32;
    const float step = d * static_cast<float>(static_cast<int8_t>(scales[i / 16]));
    out[i] = step * static_cast<float>(q);
  }
}

void Iq4Nl(const uint8_t* b, float* out) {
  const float d = Half(b);
  for (int i = 0; i < kSmall; ++i) out[i] = d * static_cast<float>(kNormalSteps[Nibble(b + 2, i)]);
}

void Iq4Xs(const uint8_t* b, float* out) {
  const float d = Half(b);
  const int high = b[2] | b[3] << 8;
  for (int s = 0; s < 8; ++s) {
    const int scale = (b[4 + s / 2] >> (s % 2 * 4) & 15) | (high >> (2 * s) & 3) << 4;
    const float step = d * static_cast<float>(scale - 32);
    for (int i = 0; i < 32; ++i) {
      out[s * 32 + i] = step * static_cast<float>(kNormalSteps[Nibble(b + 8 + s * 16, i)]);
    }
  }
}

void Mxfp4(const uint8_t* b, float* out) {
  const float d = Mxfp4Scale(b[0]);
  for (int i = 0; i < kSmall; ++i) out[i] = d * static_cast<float>(kFloat4Steps[Nibble(b + 1, i)]);
}

using BlockFunction = void (*)(const uint8_t* block, float* out);

struct Widening {
  GgufType type;
  BlockFunction function;
};
constexpr Widening kWidenings[] = {
    {GgufType::kQ4_0, Q4_0},   {GgufType::kQ4_1, Q4_1},    {GgufType::kQ5_0, Q5_0},
    {GgufType::kQ5_1, Q5_1},   {GgufType::kQ8_0, Q8_0},    {GgufType::kQ2_K, Q2_K},
    {GgufType::kQ3_K, Q3_K},   {GgufType::kQ4_K, Q4_K},    {GgufType::kQ5_K, Q5_K},
    {GgufType::kQ6_K, Q6_K},   {GgufType::kIQ4_NL, Iq4Nl}, {GgufType::kIQ4_XS, Iq4Xs},
    {GgufType::kMxfp4, Mxfp4},
};

BlockFunction FunctionOf(GgufType type) {
  for (const Widening& widening : kWidenings) {
    if (widening.type == type) return widening.function;
  }
  return nullptr;
}

DType PlainDType(GgufType type) {
  if (type == GgufType::kF32) return DType::kF32;
  return type == GgufType::kF16 ? DType::kF16 : DType::kBf16;
}

}  // namespace

std::optional<GgufType> ParseGgufType(uint32_t number) {
  for (const GgufTypeTraits& traits : kTypes) {
    if (static_cast<uint32_t>(traits.type) == number) return traits.type;
  }
  return std::nullopt;
}

absl::string_view GgufTypeName(uint32_t number) {
  for (const GgufTypeTraits& traits : kTypes) {
    if (static_cast<uint32_t>(traits.type) == number) return traits.name;
  }
  for (const OtherType& other : kOthers) {
    if (other.number == number) return other.name;
  }
  return "";
}

const GgufTypeTraits& TraitsOf(GgufType type) {
  for (const GgufTypeTraits& traits : kTypes) {
    if (traits.type == type) return traits;
  }
  CARREL_CHECK(!"a type of the enumeration");
  return kTypes[0];
}

int64_t GgufBytes(GgufType type, int64_t elements) {
  const GgufTypeTraits& traits = TraitsOf(type);
  CARREL_CHECK(elements >= 0 && elements % traits.block_elements == 0);
  return elements / traits.block_elements * traits.block_bytes;
}

void Dequantize(GgufType type, const void* blocks, int64_t elements, float* out) {
  const GgufTypeTraits& traits = TraitsOf(type);
  CARREL_CHECK(elements % traits.block_elements == 0);
  if (!traits.quantized) {
    WidenToFloat(PlainDType(type), blocks, elements, out);
    return;
  }
  const BlockFunction widen = FunctionOf(type);
  const uint8_t* block = static_cast<const uint8_t*>(blocks);
  for (int64_t at = 0; at < elements; at += traits.block_elements) {
    widen(block, out + at);
    block += traits.block_bytes;
  }
}

}  // namespace carrel::kernels
