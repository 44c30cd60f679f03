// What: a small random model twice: as a GGUF file, and as the Hugging Face folder of the same
//       weights. Tests only.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "common/dtype.h"
#include "kernels/layer/dequantize/dequantize.h"
#include "model/gguf_writer.h"

namespace carrel::model {

struct GgufTestModel {
  std::string architecture = "llama";  // qwen2, qwen3
  // Of the matrices, by what their names contain ("attn_q", "ffn_down", ...); others are F32. Rows
  // have 256 elements, of ffn_down 512.
  std::map<std::string, kernels::GgufType> types;
  bool biases = false;  // of every projection, and exact in bf16
  bool tied = true;
  uint64_t seed = 1;
};

inline constexpr int64_t kGgufTestVocab = 96;

// The file without a tokenizer.
GgufWriter MakeGguf(const GgufTestModel& model);

// The folder: quantised matrices as `dtype` (f32, or rounded to bf16), the rest as they are.
// `folder` must exist.
absl::Status WriteSameModel(const GgufTestModel& model, DType dtype, const std::string& folder);

}  // namespace carrel::model
