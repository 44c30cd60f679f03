// What:   rows whose binary codes agree most with those of the queries.
// Math:   code(x) = sign(x W); score[j] = sum over the request's queries of
//         (bits - popcount(code(q) xor code(k[j]))); the best `budget` rows, ties by smaller id,
//         are attended without a second look.
// Source: HATA (docs/methods.md, D): section 3, score and sum over the group. Differs: the keys'
//         mean is taken off before the sign, which no order of scores notices and which centres the
//         bits; W is random rotations of head_dim directions each, in bf16, or, with stored codes,
//         the decoder of the context's code index (kvstore/index/code.h: staged codes, the query's
//         sign against each direction), where HATA descends a gradient. New keys are dense in the
//         window and need no code.
// Errors: NotFound no code index is stored (kStored); Unimplemented its bits are no multiple of 32.
// Cost:   bits / 8 bytes per key and token; no key is read.
#pragma once

#include <memory>

#include "decoder/refine/refiner.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<Refiner>> MakeHashRefiner(const HashConfig& config,
                                                         const AttentionShape& shape, RowRange zone,
                                                         const HostRows& rows, ThreadPool* pool);

}  // namespace carrel::decoder
