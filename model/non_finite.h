// What:   whether weights hold NaN or infinite numbers, for who has computed one and must say why.
// Cost:   reads the weights up to the first such tensor: for errors alone.
#pragma once

#include "absl/status/status.h"
#include "model/weights.h"

namespace carrel::model {

// `status`, whose message then names the tensor, as its file does, the place and the number; or `status` as it
// is, where every weight is finite.
absl::Status NameNonFinite(const Weights& weights, const absl::Status& status);

}  // namespace carrel::model
