#include "decoder/client/wire.h"

#include <cstring>

#include "absl/strings/str_join.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/status.h"

namespace carrel::decoder {
namespace {

absl::Status Check(const v1::Tensor& tensor, v1::Tensor::DType dtype, int64_t element_bytes,
                   absl::Span<const int64_t> shape, absl::string_view what) {
  bool fits = tensor.dtype() == dtype && tensor.shape_size() == static_cast<int>(shape.size());
  int64_t elements = 1;
  for (int i = 0; fits && i < tensor.shape_size(); ++i) {
    const int64_t size = tensor.shape(i);
    fits = size >= 0 && size <= (int64_t{1} << 40) && (shape[i] == -1 || shape[i] == size) &&
           !__builtin_mul_overflow(elements, size, &elements);
  }
  fits = fits && static_cast<int64_t>(tensor.data().size()) == elements * element_bytes;
  if (fits) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "reply: ", what, " is ", v1::Tensor::DType_Name(tensor.dtype()), " [",
      absl::StrJoin(tensor.shape(), ", "), "] of ", tensor.data().size(), " bytes, expected ",
      v1::Tensor::DType_Name(dtype), " [", absl::StrJoin(shape, ", "), "]"));
}

}  // namespace

void SetFloats(const float* data, absl::Span<const int64_t> shape, v1::Tensor* tensor) {
  tensor->set_dtype(v1::Tensor::F32);
  int64_t elements = 1;
  for (int64_t size : shape) {
    tensor->add_shape(size);
    elements *= size;
  }
  tensor->set_data(reinterpret_cast<const char*>(data),
                   static_cast<size_t>(elements) * sizeof(float));
}

void SetSelection(const select::Selection& selection, v1::Query& query) {
  v1::Select& select = *query.mutable_select();
  select.Clear();
  query.clear_head_top_k();
  if (select::IsAll(selection)) select.set_all(true);
  if (const auto* top_k = std::get_if<select::TopK>(&selection)) {
    select.set_top_k(top_k->rows);
    query.mutable_head_top_k()->Assign(top_k->of_head.begin(), top_k->of_head.end());
  }
  if (const auto* range = std::get_if<select::Range>(&selection)) {
    select.set_range(range->below);
    select.set_max_rows(range->max_rows);
  }
  if (const auto* mass = std::get_if<select::Mass>(&selection)) {
    select.set_mass(mass->share);
    select.set_max_rows(mass->max_rows);
  }
}

absl::Status CheckFloats(const v1::Tensor& tensor, absl::Span<const int64_t> shape,
                         absl::string_view what) {
  return Check(tensor, v1::Tensor::F32, 4, shape, what);
}
absl::Status CheckBf16(const v1::Tensor& tensor, absl::Span<const int64_t> shape,
                       absl::string_view what) {
  return Check(tensor, v1::Tensor::BF16, 2, shape, what);
}
absl::Status CheckIds(const v1::Tensor& tensor, absl::Span<const int64_t> shape,
                      absl::string_view what) {
  return Check(tensor, v1::Tensor::I64, 8, shape, what);
}

void CopyFloats(const v1::Tensor& tensor, std::vector<float>& to) {
  to.resize(tensor.data().size() / sizeof(float));
  std::memcpy(to.data(), tensor.data().data(), to.size() * sizeof(float));
}

int64_t Dimension(const v1::Tensor& tensor, int i) {
  return i < tensor.shape_size() ? tensor.shape(i) : 0;
}

}  // namespace carrel::decoder
