// What:   IndexParams as a manifest records them, and back.
// Errors: InvalidArgument an unknown kind or a parameter outside its bounds: names it.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/index/index.h"

namespace carrel::v1 {
class IndexSpec;
class Manifest;
}  // namespace carrel::v1

namespace carrel::kvstore {

// Manifest.index.kind of a context whose heads differ: see Manifest.head_indexes.
inline constexpr absl::string_view kAutoIndexKind = "auto";

void SetIndexSpec(const IndexParams& params, v1::IndexSpec& spec);
absl::StatusOr<IndexParams> IndexParamsOf(const v1::IndexSpec& spec);

// Of each layer and KV head, [layers, kv_heads]: the manifest's index, or under "auto" each head's
// own. DataLoss if head_indexes do not name every head once.
absl::StatusOr<std::vector<IndexParams>> HeadIndexParamsOf(const v1::Manifest& manifest);

}  // namespace carrel::kvstore
