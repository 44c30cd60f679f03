// What:   what one layer leaves behind when every token has passed it, as it will be stored.
// Shapes: k, v [kv_heads] of [tokens, head_dim] bf16; queries [kv_heads] of [samples, group, head_dim] f32 at sample_positions, after RoPE.
#pragma once

#include <cstdint>
#include <vector>

#include "common/ids.h"

namespace carrel::prefill {

struct LayerRows {
  Layer layer;
  std::vector<std::vector<uint16_t>> k;
  std::vector<std::vector<uint16_t>> v;
  std::vector<std::vector<float>> queries;
  std::vector<Position> sample_positions;
};

// Evenly spread over the document, one per equal stretch: min(samples, tokens) positions, ascending.
std::vector<Position> SamplePositions(int64_t tokens, int64_t samples);

}  // namespace carrel::prefill
