// What:   options of a retrieval that are the lab's: want=rows and values with their row cache, prefetch=verified,
//         budget=linear and measured, mask=q-head, rope=infinitehip. What they take, and what they do not go together
//         with, is said in lab/options; a program without the lab refuses them (lab/without/options.cc).
// Errors: InvalidArgument names what does not go together; Unimplemented an option of the lab, of a program without it.
// Threads: any.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "decoder/config.h"

namespace carrel::decoder {

absl::Status ValidateLabOptions(const RetrievalConfig& config);
// Of config that is valid: where the model runs.
absl::Status ValidateLabDevice(const DeviceConfig& device, const RetrievalConfig& config);

// Of a budget that is not uniform: each sparse layer's share of top_k, 1 in the mean (docs/methods.md, layer budgets).
std::vector<double> LabLayerShares(const RetrievalConfig& config, int32_t sparse_layers);

}  // namespace carrel::decoder
