// What:   the sampled queries of a stored head, and the query drift of a stored layer: what a predicted
//         query of it lacks before RoPE, mean over sampled tokens of the document (Kind::kQueryDrift,
//         f32 [q_heads, head_dim]).
// Errors: NotFound no queries are stored; DataLoss what is damaged or missing, of another shape than the
//         manifest's, or a drift that is not finite (names context, layer, head).
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "kvstore/format/sampled_queries.h"

namespace carrel::kvstore {

class StoredContext;

absl::StatusOr<SampledQueries> ReadSampledQueries(const StoredContext& context, Layer layer,
                                                  KvHead kv_head);
// Empty: by its manifest the layer has none (layer 0, contexts not made by prefill).
absl::StatusOr<std::vector<float>> ReadQueryDrift(const StoredContext& context, Layer layer);

}  // namespace carrel::kvstore
