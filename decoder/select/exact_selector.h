// What:   the rows with the largest exact group scores: what every other method approximates.
// Math:   decision 004: max_h (scale * <q[h], k[j]> - lse[h]) with lse over the zone; ties by
//         smaller id. The same rows as a flat index finds.
//         scan=int8: every key is scored in 8 bits first (int8_keys.h). With t the score of the last
//         of the best by them and e the most that a score is off by, only rows of t - 2 e and more
//         can be among the best: these are scored exactly. lse is over the scores in 8 bits: of one
//         q head the rows are the same, and of several what is off is the weight between heads.
// Source: Exact top-k decoding (docs/methods.md), Algorithm 1, with a scan as its index.
// Ownership: rows and pool outlive it.
// Cost:   reads every key of the zone once per token, spread over the pool; scan=int8: half the
//         bytes, and keys a second time of few rows more than are selected.
#pragma once

#include <memory>

#include "decoder/select/row_selector.h"

namespace carrel::decoder {

std::unique_ptr<RowSelector> MakeExactSelector(const ExactConfig& config,
                                               const AttentionShape& shape, RowRange zone,
                                               const HostRows& rows, ThreadPool* pool);

}  // namespace carrel::decoder
