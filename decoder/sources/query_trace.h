// What:   the queries of an answer's tokens, kept while it is generated: what its sources are found by
//         afterwards (attended_rows.h). Attention is not changed by it.
//         Of a block of tokens the last is kept: the one whose logits give a token of the answer. When
//         there are more than kMaxTokens, every other one goes, and of what follows every second (then
//         fourth..) is kept: spread evenly over the answer.
// Shapes: q [tokens, q_heads, head_dim] after RoPE; lse [tokens, q_heads], of attention over all rows.
// Cost:   layers * q_heads * (head_dim + 1) * 4 bytes per token kept.
// Threads: one.
#pragma once

#include <cstdint>
#include <vector>

#include "common/ids.h"

namespace carrel::decoder {

class QueryTrace {
 public:
  static constexpr int64_t kMaxTokens = 64;

  explicit QueryTrace(const AttentionShape& shape);

  void Clear();
  // Before a block passes the layers, which then Add in their order. False: nothing of it is kept.
  bool BeginBlock(bool keep);
  // q [n, q_heads, head_dim], lse [n, q_heads].
  void Add(Layer layer, const float* q, const float* lse, int64_t n);
  bool keeping() const { return keeping_; }

  int64_t tokens() const { return static_cast<int64_t>(steps_.size()); }
  // Which token of the answer each is of, from 0.
  const std::vector<int64_t>& steps() const { return steps_; }
  // Layers that look at the newest rows alone tell nothing.
  bool has(Layer layer) const { return !layers_[layer.value()].q.empty(); }
  const float* q(Layer layer) const { return layers_[layer.value()].q.data(); }
  const float* lse(Layer layer) const { return layers_[layer.value()].lse.data(); }

 private:
  struct Kept {
    std::vector<float> q, lse;
  };
  void DropEveryOther();

  const AttentionShape shape_;
  std::vector<Kept> layers_;
  std::vector<int64_t> steps_;
  int64_t seen_ = 0, stride_ = 1;
  bool keeping_ = false;
};

}  // namespace carrel::decoder
