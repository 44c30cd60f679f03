// What:   rows whose binary codes the queries score best. Of these candidates, those with the best
//         exact scores.
// Math:   code(x) = sign(x W). query=weights: a key is about centre + sum_i b_i decoder[i], b its
//         code; score[j] = max over the request's queries of (scale sum_i b_i <q, decoder[i]> - the
//         logarithm of the sum of exponentials of such scores, over 256 rows in even steps).
//         query=signs: score[j] = sum over the request's queries of (bits - popcount(code(q) xor
//         code(k[j]))). The best oversample x budget rows, ties by smaller id, are candidates. Their
//         exact scores decide: the best `budget` by group score (kernels/score/group_score), a query's lse
//         being over the candidates. oversample = 1: every candidate is taken, as in the paper.
// Source: query=weights: decision 043, kernels/score/code_score. query=signs: HATA (docs/methods.md),
//         section 3, score and sum over the group. Differs from HATA: the keys' mean is taken off
//         before the sign, which no order of scores notices and which centres the bits; W is random
//         rotations of head_dim directions each, in bf16, or, with stored codes, the decoder of the
//         context's code index (kvstore/index/code/code.h: staged codes), where HATA descends a gradient.
//         New keys are dense in the window and need no code.
// Errors: NotFound no code index is stored (kStored); Unimplemented its bits are no multiple of 32.
// Ownership: the rows outlive it.
// Cost:   bits / 8 bytes per key of the zone and token; with oversample > 1 the candidates' keys.
#pragma once

#include "absl/status/statusor.h"
#include "decoder/select/host_rows.h"
#include "decoder/select/selector_config.h"

namespace carrel::decoder {

// What kAuto means for a context; null: its rows are not in this host's memory, codes are random.
// Never kAuto.
absl::StatusOr<HashSource> SourceOfCodes(const HashConfig& config, const HostRows* rows);

}  // namespace carrel::decoder
