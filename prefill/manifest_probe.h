// What:   sampled weights (model/weights_probe.h) as a context's manifest has them.
// Errors: DataLoss a type that is none of f32, f16, bf16. What else a store could have wrong is
//         checked where a probe is used.
#pragma once

#include "absl/status/statusor.h"
#include "model/weights_probe.h"

namespace carrel::v1 {
class WeightsProbe;
}

namespace carrel::prefill {

v1::WeightsProbe ProbeToProto(const model::WeightsProbe& probe);
absl::StatusOr<model::WeightsProbe> ProbeFromProto(const v1::WeightsProbe& stored);

}  // namespace carrel::prefill
