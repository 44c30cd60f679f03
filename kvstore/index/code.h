// What:   binary codes scanned in order, then exact scores of the best: linear, nothing to learn
//         about the distribution of queries, 16 bytes per key at 128 bits.
// Math:   code(k) = sign(W (k - mean)), decoded as k ~ mean + D code: <q, k> ~ <q, mean> + <D^T q,
//         code>. W [code_bits, head_dim] is a random rotation (several, if code_bits > head_dim) or
//         learned; D is the least-squares decoder of the head's own keys. The rows with the best
//         group scores by the estimate (kernels/code_score) are scored exactly.
// Source: HATA (003, section 3) for learned W; differs in that the query is not quantised: its
//         products with the decoded bits are looked up, four bits at a time.
// Cost:   code_bits / 8 bytes read per key, once for the group; effort rows read at random.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvstore/index/index.h"

namespace carrel::kvstore {

// Heap of an open code index, at most: W, D and mean at 256 bits and the largest head_dim.
inline constexpr int64_t kMaxCodeHeapBytes = int64_t{16} << 20;

// Rows whose bytes tie a blob to the rows it was built from.
inline constexpr int64_t kCodeCheckedRows = 8;

absl::StatusOr<std::string> BuildCode(const IndexParams& params, const Rows& keys,
                                      const SampledQueries* queries);
absl::StatusOr<std::unique_ptr<Index>> OpenCode(const IndexParams& params, Blob blob, Rows keys);

}  // namespace carrel::kvstore
