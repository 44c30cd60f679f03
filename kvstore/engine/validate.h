// What:   whether a request fits its context and the engine's limits.
// Errors: InvalidArgument; messages say what, value, bound and where:
//         "query: top_k=70000 exceeds max_top_k=65536 (context=report layer=3)".
#pragma once

#include "absl/status/statusor.h"
#include "kvstore/engine/engine_config.h"
#include "kvstore/engine/open_context.h"
#include "kvstore/engine/request.h"

namespace carrel::kvstore {

// The rows that the store searches: what sink and local leave, possibly none.
absl::StatusOr<RowRange> ZoneOf(const OpenContext& context, int64_t sink, int64_t local);

absl::Status ValidateQuery(const QueryRequest& request, const OpenContext& context,
                           const EngineConfig& config);
absl::Status ValidateFetch(const FetchRequest& request, const OpenContext& context,
                           const EngineConfig& config);

// Whether the rows of a context are those that a model would compute. InvalidArgument an empty fingerprint or a
// name given twice; FailedPrecondition names every field that differs, is missing or is too many, with both
// values.
absl::Status CheckFingerprint(const FingerprintFields& context, const FingerprintFields& model);

}  // namespace carrel::kvstore
