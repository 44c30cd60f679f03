// What:   some tokens of a document computed once more, as a decoder would compute them, over the rows
//         that were sealed for the tokens before them, layer by layer, each layer from what prefill
//         says entered it. K and V of every layer are compared with what was sealed for the tokens,
//         and what leaves a layer with what prefill says entered the next.
// Math:   of x' computed again and x: error = |x' - x| / max(|x'|, |x|); of states, x is what the
//         layer adds. Allowed is 2^-8 + 4 s, of rows at most 3/4: half a unit in the last place of
//         bf16 moves x by 2^-9 of itself at most, and s is what rounding may do on the way through
//         the layer. s is measured: each token has a shadow, computed beside it over rows of which
//         every number is moved by 2^-8 of itself, up or down, equal ones the same way, and with what
//         enters the layer and what attention gives moved by product_error. s of rows is the largest
//         |shadow - x'| / max(|shadow|, |x'|) of any token, head and kind in the layer; of a state it is
//         the token's own, or the largest of 16 more shadows if that one does not explain the error.
//         A row that is missing is off by 1, one of another token, head, layer or sign by about that
//         or more (docs/decisions/084-recheck-by-layers.md).
// Errors: DataLoss what is farther off (names layer, token, of rows KV head and K or V, error and
//         bound), or a row that is damaged (names the segment); InvalidArgument weights that hold NaN
//         or infinite numbers, as far as they show in the tokens; those of `entering`, and a model's.
// Threads: spread over the pool.
// Cost:   of each layer a product of 2 * tokens rows with every weight, and reading the sealed rows
//         before the last token.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
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

// A job's, so that it goes on with the tokens that it drew at first: of its context's random id.
uint64_t RecheckSeed(absl::string_view context_id);

// min(count, all) positions, ascending.
std::vector<Position> DrawPositions(int64_t all, int64_t count, uint64_t seed);

// What entered a layer, of the positions that the config draws: f32 [positions, hidden_size].
using EnteringStates = absl::FunctionRef<absl::StatusOr<std::vector<float>>(Layer)>;

// The largest share of its bound that any error takes.
absl::StatusOr<double> Recheck(const model::Checkpoint& checkpoint,
                               const std::vector<TokenId>& tokens,
                               const kvstore::StoredContext& sealed, EnteringStates entering,
                               const RecheckConfig& config, ThreadPool* pool);

}  // namespace carrel::prefill
