// What:   the sampled queries of a stored head.
// Errors: NotFound none are stored; DataLoss damaged ones, or of another shape than the manifest's
//         (names context, layer, head).
#pragma once

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "kvstore/format/sampled_queries.h"

namespace carrel::kvstore {

class StoredContext;

absl::StatusOr<SampledQueries> ReadSampledQueries(const StoredContext& context, Layer layer,
                                                  KvHead kv_head);

}  // namespace carrel::kvstore
