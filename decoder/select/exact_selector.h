// What:   the rows with the largest exact group scores: what every other method approximates.
// Math:   decision 004: max_h (scale * <q[h], k[j]> - lse[h]) with lse over the zone; ties by
//         smaller id. The same rows as a flat index finds.
// Source: Exact top-k decoding (docs/methods.md), Algorithm 1, with a scan as its index.
// Ownership: rows and pool outlive it.
// Cost:   reads every key of the zone once per token, spread over the pool. A zone that
//         a session looks through (ScansHere) is scanned in 8 bits instead (kvstore/index/int8_scan.h).
#pragma once

#include <memory>

#include "decoder/select/row_selector.h"

namespace carrel::decoder {

std::unique_ptr<RowSelector> MakeExactSelector(const AttentionShape& shape, RowRange zone,
                                               const HostRows& rows, ThreadPool* pool);

}  // namespace carrel::decoder
