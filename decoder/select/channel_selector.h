// What:   rows with the best scores over a few important channels of the keys are candidates; those
//         of them with the best exact scores are taken.
// Math:   C = the head_dim / share channels (rounded up to an even number) with the largest mean
//         |q_c| over the head's sampled queries, mean |k_c| over the zone's keys, or the product of
//         both, which is the mean of |q_c k_c| over all pairs. L = K[:, C] in 4 bits: per channel,
//         16 levels from its least to its largest value. s~[h, j] = scale * sum_c q[h, c] L[j, c];
//         the group's candidates, oversample x budget, by group score (kernels/score/group_score) of s~,
//         ties by smaller id; of them the best `budget` as hash_selector.h says.
// Source: Double Sparsity (docs/methods.md): section 4, algorithm 1; outlier variants of its
//         table 3 (q under GQA). Differs: calibrated on the document's own queries instead of a
//         text corpus; q heads of a group are joined by group score, where the paper has one q head
//         per KV head.
// Errors: NotFound no sampled queries are stored (by = q, qk).
// Ownership: the rows outlive it.
// Cost:   head_dim / share / 2 bytes per key and token (a lookup per byte and q head); with
//         oversample > 1 the candidates' keys.
#pragma once

#include <memory>

#include "decoder/select/row_selector.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<RowSelector>> MakeChannelSelector(const ChannelConfig& config,
                                                                 const AttentionShape& shape,
                                                                 RowRange zone,
                                                                 const HostRows& rows,
                                                                 ThreadPool* pool);

}  // namespace carrel::decoder
