// What:   how good a layer's attention was: how far it is from dense attention, per token, and what share of
//         the softmax the attended rows carry.
// Math:   ||o - dense|| / ||dense|| over all q heads, where o = merge(window, zone) and dense =
//         merge(window, every row of the zone), for the same queries.
//         mass: sum of exp(score - lse) of the attended rows over the zone, or over zone and window.
// Shapes: partials [n, q_heads].   Edge: dense of zero: the norm of o.
#pragma once

#include <cstdint>
#include <vector>

#include "common/ids.h"
#include "decoder/statistics.h"
#include "decoder/window/partial.h"

namespace carrel::decoder {

// Adds n values.
void AddOutputErrors(const Partial& window, const Partial& zone, const Partial& dense_zone,
                     int64_t n, const AttentionShape& shape, Mean& error);

// To mass and attended_mass, of n tokens' q heads: zone_lse of every row of the zone, rows_lse of those
// attended, window_lse of what the decoder holds.
void AddMass(const std::vector<float>& zone_lse, const std::vector<float>& rows_lse,
             const std::vector<float>& window_lse, LayerStatistics& statistics);

}  // namespace carrel::decoder
