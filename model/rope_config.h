// What:   the rope part of config.json, in both spellings: `rope_theta` + `rope_scaling` {type |
//         rope_type}, and `rope_parameters` {rope_theta, rope_type}.
// Errors: InvalidArgument a parameter that is missing, out of range, not one of the type's own, or
//         contradicted by the other spelling; Unimplemented another rope type, a partial rotation,
//         parameters per layer type (names it).
#pragma once

#include "absl/status/statusor.h"
#include "common/json.h"
#include "model/config.h"

namespace carrel::model {

// max_position_embeddings: what yarn takes for the original length where it has none.
absl::StatusOr<RopeConfig> ParseRopeConfig(const JsonFields& config,
                                           int64_t max_position_embeddings);

// Gemma 3's two: rope_parameters {full_attention, sliding_attention}; or rope_theta and rope_scaling
// of the full layers beside rope_local_base_freq. Linear scaling and none are read.
struct LayeredRope {
  RopeConfig full, sliding;
};
absl::StatusOr<LayeredRope> ParseLayeredRope(const JsonFields& config,
                                             int64_t max_position_embeddings);

// As rope_type has it; model/config.cc.
const char* RopeTypeName(RopeType type);

}  // namespace carrel::model
