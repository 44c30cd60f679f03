// What:    what approximate queries lack, learned while a sequence is decoded. q~ of a layer, seen
//          from the hidden state that enters the layer before, is off by much the same vector token
//          after token; the tokens so far tell it.
// Math:    drift = mean over the tokens so far of R_t^-1 (q - q~), the newest with weight
//          max(1 / tokens, 1 / 5);  q~ <- q~ + R_t drift.  R_t: RoPE at the token's position.
// Source:  ours; what it gives is in docs/benchmarks.md, why it is like this in decision 026.
// Shapes:  queries [n, q_heads, head_dim] f32, token i at first_position + i, all after RoPE.
// Edge:    the tokens of a block share what was known before it: of a sequence's first block q~
//          stays as it is.
// Threads: one.
// Cost:    two passes over q and q~ per layer; two queries' memory per layer, and one block's.
#pragma once

#include <cstdint>
#include <vector>

#include "common/ids.h"

namespace carrel::decoder {

class QueryDrift {
 public:
  // inv_freq [head_dim / 2], of RoPE; empty: queries stand nowhere.
  QueryDrift(const AttentionShape& shape, std::vector<float> inv_freq);

  // Adds to the approximate queries of a layer what they are expected to lack.
  void Correct(Layer layer, int64_t n, Position first_position, float* approximate_q);
  // The same tokens' true queries. Nothing happens unless they were corrected before.
  void Learn(Layer layer, int64_t n, Position first_position, const float* q);
  void StartSequence();

 private:
  struct OfLayer {
    std::vector<float> mean;     // [q_heads, head_dim], before RoPE
    std::vector<float> guessed;  // q~ of the block at hand, as it came
    int64_t tokens = 0;
  };
  int64_t width() const { return int64_t{shape_.q_heads} * shape_.head_dim; }
  void Turn(float* x, int64_t n, Position first_position, const std::vector<float>& by) const;

  const AttentionShape shape_;
  const std::vector<float> inv_freq_, inverse_;
  std::vector<OfLayer> layers_;
  std::vector<float> scratch_;
};

}  // namespace carrel::decoder
