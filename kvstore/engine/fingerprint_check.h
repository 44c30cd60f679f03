// What:   whether the rows of a context are those that a model would compute.
// Errors: InvalidArgument an empty fingerprint or a name given twice; FailedPrecondition names
//         every field that differs, is missing or is too many, with both values.
#pragma once

#include "absl/status/status.h"
#include "kvstore/engine/request.h"

namespace carrel::kvstore {

absl::Status CheckFingerprint(const FingerprintFields& context, const FingerprintFields& model);

}  // namespace carrel::kvstore
