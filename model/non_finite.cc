#include "model/non_finite.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/layer/dequantize/dequantize.h"

namespace carrel::model {
namespace {

// The first of a tensor's rows that holds one; empty: none does.
std::string FindIn(absl::Span<const int64_t> shape,
                   absl::FunctionRef<void(int64_t, float*)> read_row) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  std::vector<float> row(shape.empty() ? 1 : static_cast<size_t>(shape.back()));
  for (int64_t r = 0; r < rows; ++r) {
    read_row(r, row.data());
    const auto bad =
        std::find_if(row.begin(), row.end(), [](float x) { return !std::isfinite(x); });
    if (bad == row.end()) continue;
    return absl::StrCat("holds ", *bad, " in row ", r, " at ", bad - row.begin(), " of [",
                        absl::StrJoin(shape, ", "), "]");
  }
  return "";
}

std::string FindNonFinite(const Weights& weights) {
  for (const auto& tensor : weights.checkpoint().tensors()) {
    const auto& view = tensor.second;
    if (view.dtype != DType::kF32 && view.dtype != DType::kF16 && view.dtype != DType::kBf16) {
      continue;
    }
    const int64_t width = view.shape.empty() ? 1 : view.shape.back();
    const std::string found = FindIn(view.shape, [&](int64_t row, float* out) {
      WidenToFloat(view.dtype, view.bytes.data() + row * width * DTypeBytes(view.dtype), width,
                   out);
    });
    if (!found.empty()) {
      return absl::StrCat("tensor \"", weights.NameInFile(tensor.first), "\" ", found);
    }
  }
  for (const auto& tensor : weights.blocks()) {
    const auto& blocks = tensor.second;
    const int64_t bytes = kernels::GgufBytes(blocks.type, blocks.in);
    const auto* data = static_cast<const char*>(blocks.data);
    const std::string found = FindIn({blocks.out, blocks.in}, [&](int64_t row, float* out) {
      kernels::Dequantize(blocks.type, data + row * bytes, blocks.in, out);
    });
    if (!found.empty()) {
      return absl::StrCat("tensor \"", weights.NameInFile(tensor.first), "\" ", found);
    }
  }
  return "";
}

}  // namespace

absl::Status NameNonFinite(const Weights& weights, const absl::Status& status) {
  const std::string found = FindNonFinite(weights);
  if (found.empty()) return status;
  return absl::Status(status.code(), absl::StrCat(status.message(), ": ", found));
}

}  // namespace carrel::model
