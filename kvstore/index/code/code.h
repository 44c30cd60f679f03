// What:   binary codes scanned in order, then exact scores of the best: linear, nothing to learn
//         about the distribution of queries, 16 bytes per key at 128 bits.
// Math:   k ~ centre + sum_i b_i D[i], b_i in {-1, +1}, so <q, k> ~ <q, centre> + sum_i b_i <q,
//         D[i]>; the rows with the best group scores by this estimate (kernels/score/code_score) are
//         scored exactly. Bits come in stages, each the signs of some directions of what the stages
//         before left over; D is the least-squares decoder of the head's own keys. Random: each
//         stage is a random rotation. Staged training: what is left over is measured as the head's
//         sampled queries see it, |r|^2 = E <q, r>^2, and a stage spends its bits where most is
//         left. HATA: one stage of directions W learned by gradient descent (hash_training.h), of
//         the key less the mean. A symmetric scan compares signs (kernels/select/hamming_topk): the
//         query's bits are the signs of its products with W, or with D where there is no W.
// Source: ours (docs/decisions/014) but for HATA (2025, section 3).
// Cost:   code_bits / 8 bytes read per key, once for the group; effort rows read at random.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "kvstore/index/index.h"

namespace carrel::kvstore {

// Rows whose bytes tie a blob to the rows it was built from.
inline constexpr int64_t kCodeCheckedRows = 8;

absl::StatusOr<std::string> BuildCode(const IndexParams& params, const Rows& keys,
                                      const SampledQueries* queries,
                                      Accelerator* accelerator = nullptr);

}  // namespace carrel::kvstore
