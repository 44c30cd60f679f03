// What:   element types of stored tensors, and conversions to and from float.
// Math:   to bf16 and fp16 round to nearest even; NaN stays NaN; widening is exact.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/bf16.h"

namespace carrel {

enum class DType : uint8_t { kF32 = 0, kF16 = 1, kBf16 = 2, kI32 = 3, kI64 = 4 };

int64_t DTypeBytes(DType dtype);
absl::string_view DTypeName(DType dtype);  // "f32", "f16", "bf16", "i32", "i64"

float F16ToFloat(uint16_t x);

void Bf16ToFloat(absl::Span<const uint16_t> in, float* out);
void FloatToBf16(absl::Span<const float> in, uint16_t* out);

// Widens count elements of dtype (f32, f16 or bf16) at in, which need not be aligned, to out.
void WidenToFloat(DType dtype, const void* in, int64_t count, float* out);

}  // namespace carrel
