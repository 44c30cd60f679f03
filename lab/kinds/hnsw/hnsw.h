// What:   HNSW whose vectors are the mapped rows: the blob holds links only (128 + ~9 bytes per key
//         at m = 16). Faiss builds the graph, our own walk searches it.
// Source: Malkov and Yashunin 2016 (arXiv 1603.09320); Faiss 1.7.3 HNSW.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "kvstore/index/index.h"

namespace carrel::kvstore {

absl::StatusOr<std::string> BuildHnsw(const IndexParams& params, const Rows& keys);

}  // namespace carrel::kvstore
