// What:   the query drift of a stored layer: what a predicted query of it lacks before RoPE, mean
//         over sampled tokens of the document (Kind::kQueryDrift, f32 [q_heads, head_dim]).
// Edge:   empty: by its manifest the layer has none (layer 0, contexts not made by prefill).
// Errors: DataLoss one that is damaged or missing, of another shape than the manifest's, or not
//         finite (names context, layer).
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"

namespace carrel::kvstore {

class StoredContext;

absl::StatusOr<std::vector<float>> ReadQueryDrift(const StoredContext& context, Layer layer);

}  // namespace carrel::kvstore
