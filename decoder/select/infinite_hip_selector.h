// What:   modular hierarchical pruning: stages that each keep the best chunks of what the stage
//         before kept.
// Math:   stage i cuts its candidates into chunks of l_i tokens. In each chunk a descent picks a
//         representative: split in two, compare the middle keys of the halves (max over the
//         request's queries: block and group), go into the better, until one token is left. The
//         chunks with the k_i / l_i best representatives go on. The rows of the last stage are
//         attended.
// Source: InfiniteHiP (docs/methods.md): section 3, appendix A algorithms 2 to 4; presets of
//         appendix F. Differs: the candidates that a descent compares are the middles of the halves
//         (the review that we have does not say which); RoPE is as stored; a budget below the last
//         chunk makes that chunk smaller.
// State:  the survivors of each stage, evaluated again every `refresh` generated tokens.
// Edge:   candidates that are no more than the survivors wanted all go on, unscored.
// Cost:   2 log2(l_i) keys per chunk and stage; the first stage is linear in the zone.
#pragma once

#include <memory>

#include "decoder/select/row_selector.h"

namespace carrel::decoder {

std::unique_ptr<RowSelector> MakeInfiniteHipSelector(const InfiniteHipConfig& config,
                                                     const AttentionShape& shape, RowRange zone,
                                                     const HostRows& rows);

}  // namespace carrel::decoder
