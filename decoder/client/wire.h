// What:   protobuf tensors to and from memory, on the decoder's side.
// Errors: DataLoss a reply whose tensor has another dtype, rank or size than the request implies
//         (names it): never used, never guessed.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/selection.h"

namespace carrel::v1 {
class Query;
class Tensor;
}  // namespace carrel::v1

namespace carrel::decoder {

void SetFloats(const float* data, absl::Span<const int64_t> shape, v1::Tensor* tensor);

// In place of what the query selected.
void SetSelection(const select::Selection& selection, v1::Query& query);

// The bytes of a tensor that must have this shape; -1 leaves a dimension open. Pointers live as
// long as the message, and may be unaligned.
absl::Status CheckFloats(const v1::Tensor& tensor, absl::Span<const int64_t> shape,
                         absl::string_view what);
absl::Status CheckBf16(const v1::Tensor& tensor, absl::Span<const int64_t> shape,
                       absl::string_view what);
absl::Status CheckIds(const v1::Tensor& tensor, absl::Span<const int64_t> shape,
                      absl::string_view what);

// The floats of a tensor, which need not be aligned inside the message, in place of what was there.
void CopyFloats(const v1::Tensor& tensor, std::vector<float>& to);

int64_t Dimension(const v1::Tensor& tensor, int i);  // 0 if the rank is smaller

}  // namespace carrel::decoder
