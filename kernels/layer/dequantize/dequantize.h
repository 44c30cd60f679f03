// What:   the element types of GGUF tensors, and their widening to float.
// Math:   a type stores runs of BlockElements elements in BlockBytes bytes: small integers with one
//         or two levels of scales, w = scale * q (+ or - minimum), or values of a table of 16.
// Source: the public layout of ggml's types; goldens from the `gguf` package's dequantize
//         (tools/goldens/gguf_files.py), bit for bit.
// Shapes: rows are whole blocks, one after the other; nothing is aligned.
// Edge:   a scale of infinity or NaN gives infinities and NaN, as arithmetic has it.
// Threads: reentrant.     Cost: plain loops, about 1e9 elements a second; a product with such rows
//         in place is another kernel's matter.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace carrel::kernels {

// Values are those of the file format.
enum class GgufType : uint8_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kBf16 = 30,
  kMxfp4 = 39,
};

struct GgufTypeTraits {
  GgufType type;
  absl::string_view name;  // "Q4_1"
  int32_t block_elements;
  int32_t block_bytes;
  bool quantized;  // more than one element to a block
};

// Nothing for a number that is not one of the types above.
std::optional<GgufType> ParseGgufType(uint32_t number);
// The name of any number of the format, for messages; "type 99" has none and is "".
absl::string_view GgufTypeName(uint32_t number);
const GgufTypeTraits& TraitsOf(GgufType type);

// Bytes of `elements` elements, a multiple of block_elements.
int64_t GgufBytes(GgufType type, int64_t elements);

// out[0, elements) of the blocks at `blocks`; elements is a multiple of block_elements.
void Dequantize(GgufType type, const void* blocks, int64_t elements, float* out);

}  // namespace carrel::kernels
