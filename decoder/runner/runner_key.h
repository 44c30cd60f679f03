// What:   names what a runner computes with: checkpoints with one key are one model with the same weights and
//         adapter in memory, so that their sequences may share a runner.
// Edge:   of weights that somebody holds.
#pragma once

#include <string>

#include "model/checkpoint.h"

namespace carrel::decoder {

std::string RunnerKey(const model::Checkpoint& checkpoint);

}  // namespace carrel::decoder
