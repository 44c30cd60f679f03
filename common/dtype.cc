#include "common/dtype.h"

#include <iterator>

#include "common/status.h"

namespace carrel {

namespace {

struct Traits {
  absl::string_view name;
  int64_t bytes;
};
// By DType.
constexpr Traits kTraits[] = {{"f32", 4}, {"f16", 2}, {"bf16", 2}, {"i32", 4}, {"i64", 8}};

}  // namespace

int64_t DTypeBytes(DType dtype) {
  CARREL_CHECK(static_cast<size_t>(dtype) < std::size(kTraits));
  return kTraits[static_cast<size_t>(dtype)].bytes;
}

absl::string_view DTypeName(DType dtype) {
  const auto at = static_cast<size_t>(dtype);
  return at < std::size(kTraits) ? kTraits[at].name : "unknown";
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
