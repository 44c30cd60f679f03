#include "common/dtype.h"

#include "common/status.h"

namespace carrel {

int64_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kF16:
    case DType::kBf16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kI64:
      return 8;
  }
  CARREL_CHECK(false);
  return 0;
}

absl::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBf16:
      return "bf16";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
  }
  return "unknown";
}

float F16ToFloat(uint16_t x) {
  const uint32_t sign = uint32_t{x & 0x8000u} << 16;
  uint32_t exponent = (x >> 10) & 0x1f;
  uint32_t mantissa = x & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    if (mantissa == 0) return std::bit_cast<float>(sign);
    exponent = 1;
    while ((mantissa & 0x400) == 0) {  // normalise a subnormal
      mantissa <<= 1;
      --exponent;
    }
    mantissa &= 0x3ff;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

void Bf16ToFloat(absl::Span<const uint16_t> in, float* out) {
  for (size_t i = 0; i < in.size(); ++i) out[i] = Bf16ToFloat(in[i]);
}

void FloatToBf16(absl::Span<const float> in, uint16_t* out) {
  for (size_t i = 0; i < in.size(); ++i) out[i] = FloatToBf16(in[i]);
}

void WidenToFloat(DType dtype, const void* in, int64_t count, float* out) {
  const char* bytes = static_cast<const char*>(in);
  if (dtype == DType::kF32) {
    std::memcpy(out, bytes, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  CARREL_CHECK(dtype == DType::kF16 || dtype == DType::kBf16);
  int64_t i = 0;
  constexpr int64_t kTogether = 16;  // a fixed number: the compiler makes vectors of them
  for (; dtype == DType::kBf16 && i + kTogether <= count; i += kTogether) {
    uint16_t x[kTogether];
    std::memcpy(x, bytes + 2 * i, sizeof(x));
    for (int64_t j = 0; j < kTogether; ++j) out[i + j] = Bf16ToFloat(x[j]);
  }
  for (; i < count; ++i) {
    uint16_t x;
    std::memcpy(&x, bytes + 2 * i, sizeof(x));
    out[i] = dtype == DType::kF16 ? F16ToFloat(x) : Bf16ToFloat(x);
  }
}

}  // namespace carrel
