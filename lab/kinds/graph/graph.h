// What:   a graph over keys whose links come from what queries attend to: keys that the same
//         sampled query ranks high are linked. Searched by the walk of hnsw, on one level.
// Source: RetrievalAttention (2409.10516) and RoarGraph (2408.08933): projection of a query-key
//         bipartite graph.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "kvstore/index/index.h"

namespace carrel::kvstore {

absl::StatusOr<std::string> BuildGraph(const IndexParams& params, const Rows& keys,
                                       const SampledQueries* queries,
                                       Accelerator* accelerator = nullptr);

}  // namespace carrel::kvstore
