// What:    what predicted queries lack, learned while a sequence is decoded. q~ of a layer, seen
//          from the hidden state that enters the layer before, is off by much the same vector token
//          after token; the document's tokens, where prefill stored it, and those so far tell it.
// Math:    kernels/encode/query_drift: a running mean of what q~ lacked before RoPE, the newest token with
//          weight max(1 / tokens, 0.3), always 0.3 where it began as the context's;
//          q~ <- q~ + R_t mean.  R_t: RoPE at the token's position.
// Source:  ours; what it gives is in docs/lab/benchmarks.md, why it is like this in decision 026.
// Shapes:  queries [n, q_heads, head_dim] f32, token i at first_position + i, all after RoPE.
// Edge:    the tokens of a block share what was known before it. Where the context has no drift, q~
//          of a sequence's first block stays as it is.
// Errors:  of CheckDrift: DataLoss drift that does not fit the model.
// Threads: one.
// Cost:    two passes over q and q~ per layer; two queries' memory per layer, and one block's.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"

namespace carrel::decoder {

// The context's: [layers] of [q_heads, head_dim]; empty, whole or of a layer: not known.
using StoredDrift = std::vector<std::vector<float>>;
absl::Status CheckDrift(const StoredDrift& drift, const AttentionShape& shape);

inline constexpr float kNewestDrift = 0.3f;  // weight of the newest token, at least
// Tokens that a stored drift counts as: the next one weighs no more than any after it.
inline constexpr int32_t kStoredDriftTokens = 3;

class QueryDrift {
 public:
  // inv_freq [head_dim / 2], of RoPE; empty: queries stand nowhere.
  QueryDrift(const AttentionShape& shape, std::vector<float> inv_freq, StoredDrift stored);

  // Adds to the predicted queries of a layer what they are expected to lack.
  void Correct(Layer layer, int64_t n, Position first_position, float* predicted_q);
  // The same tokens' true queries. Nothing happens unless they were corrected before.
  void Learn(Layer layer, int64_t n, Position first_position, const float* q);
  // What is known is the context's drift again.
  void StartSequence();

 private:
  struct OfLayer {
    std::vector<float> mean;         // [q_heads, head_dim], before RoPE
    std::vector<float> predicted_q;  // q~ of the block at hand, corrected
    int64_t tokens = 0;
  };
  int64_t width() const { return int64_t{shape_.q_heads} * shape_.head_dim; }

  const AttentionShape shape_;
  const std::vector<float> inv_freq_;
  const StoredDrift stored_;
  std::vector<OfLayer> layers_;
  std::vector<float> scratch_;
};

}  // namespace carrel::decoder
