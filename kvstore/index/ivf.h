// What:   inverted lists over the mapped rows: k-means cells by Faiss, row ids only in the blob.
// Source: Faiss 1.7.3 Clustering; topk-decoding (001) uses IVF with its own copies of the keys.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvstore/index/index.h"

namespace carrel::kvstore {

absl::StatusOr<std::string> BuildIvf(const IndexParams& params, const Rows& keys);
absl::StatusOr<std::unique_ptr<Index>> OpenIvf(const IndexParams& params, const Blob& blob,
                                               Rows keys);

}  // namespace carrel::kvstore
