// What:   some tokens of a document computed once more, as a decoder would compute them: layer by
//         layer over the rows that were sealed for the tokens before them. Their K and V of every
//         layer are compared with what was sealed for them.
// Math:   of a row x' computed again and x sealed: error = |x' - x| / max(|x'|, |x|). Allowed is
//         2^-8 + 4 s, at most 3/4: half a unit in the last place of bf16 moves x by 2^-9 of itself
//         at most, and s is what rounding may do on the way. s is measured: each token has a shadow,
//         computed beside it over rows of which every number is moved by 2^-8 of itself, up or
//         down, and with what enters a layer and what attention gives moved by product_error. s is
//         the largest |shadow - x'| / max(|shadow|, |x'|) of any token, head and kind in this layer
//         and those before it. A row that is missing is off by 1, one of another token, head, layer
//         or sign by about that or more (docs/decisions/048-recheck.md).
// Errors: DataLoss a row that is farther off (names layer, KV head, token, K or V, error and bound),
//         or one that is damaged (names the segment); a model's by their own code.
// Threads: spread over the pool.
// Cost:   of each layer a product of 2 * tokens rows with every weight, and reading the sealed rows
//         before the last token.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/thread_pool.h"
#include "model/checkpoint.h"
#include "prefill/attention_config.h"

namespace carrel::kvstore {
class StoredContext;
}

namespace carrel::prefill {

// Whether rows can be told from those before them: dense attention at the document's positions. What
// a block of queries chose together is not what a token chooses alone.
bool CanRecheck(const AttentionConfig& attention);

struct RecheckConfig {
  int64_t tokens = 16;  // drawn from the document; all, where it has no more
  uint64_t seed = 0;
  KeyPosition key_position = KeyPosition::kAfterRope;
  // Of a number, what the products of the device that prefilled may move it by.
  double product_error = 0x1p-12;
};

// min(count, all) positions, ascending.
std::vector<Position> DrawPositions(int64_t all, int64_t count, uint64_t seed);

// The largest share of its bound that any row's error takes.
absl::StatusOr<double> Recheck(const model::Checkpoint& checkpoint,
                               const std::vector<TokenId>& tokens,
                               const kvstore::StoredContext& sealed, const RecheckConfig& config,
                               ThreadPool* pool);

}  // namespace carrel::prefill
