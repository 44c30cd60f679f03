// What:   how far a layer's attention is from dense attention, per token.
// Math:   ||o - dense|| / ||dense|| over all q heads, where o = merge(window, zone) and dense =
//         merge(window, every row of the zone), for the same queries.
// Shapes: partials [n, q_heads].   Edge: dense of zero: the norm of o.
#pragma once

#include <cstdint>

#include "common/ids.h"
#include "decoder/statistics.h"
#include "decoder/window/partial.h"

namespace carrel::decoder {

// Adds n values.
void AddOutputErrors(const Partial& window, const Partial& zone, const Partial& dense_zone,
                     int64_t n, const AttentionShape& shape, Mean& error);

}  // namespace carrel::decoder
