// What:   the rows of the document that the tokens of a trace attended to most, and how much: exact
//         softmax weights exp(score - lse) of each q head. Rows of the zone are asked of the store (want
//         = IDS: its index finds them, it scores them exactly); those that the decoder holds are given.
// Math:   scores are scaled by 1/sqrt(head_dim); lse is of all that the token attended to, prompt and
//         answer included, so that a token's shares over all rows add up to 1.
// Errors: DataLoss a reply that does not hold together; what the store answers.
// Threads: one.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/ids.h"

namespace carrel::retrieval {
class Session;
}

namespace carrel::decoder {

// The queries of an answer's tokens, kept while it is generated: what its sources are found by afterwards. Attention
// is not changed by it. Of a block of tokens the last is kept: the one whose logits give a token of the answer. When
// there are more than kMaxTokens, every other one goes, and of what follows every second (then
// fourth..) is kept: spread evenly over the answer.
// Shapes: q [tokens, q_heads, head_dim] after RoPE; lse [tokens, q_heads], of attention over all rows.
// Cost:   layers * q_heads * (head_dim + 1) * 4 bytes per token kept.
class QueryTrace {
 public:
  static constexpr int64_t kMaxTokens = 64;

  explicit QueryTrace(const AttentionShape& shape);

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

struct AttendedRow {
  int32_t layer = 0, q_head = 0;
  int32_t step = 0;  // the token of the answer that this was to give, from 0
  Position position = 0;
  float share = 0;  // (0, 1]
};

// What the store searches, and what one query may ask of it.
struct ZoneLimits {
  RowRange zone;
  int64_t max_top_k = 1, max_query_tokens = 1, max_result_bytes = 0;
};

inline constexpr int64_t kRowsPerToken = 32;  // of the zone that are asked for, per KV head
inline constexpr float kLeastShare = 0.01f;   // what is less is left out

// Adds those of one layer, in any order.
absl::Status AttendedInZone(const QueryTrace& trace, Layer layer, const AttentionShape& shape,
                            const ZoneLimits& limits, retrieval::Session* client,
                            std::vector<AttendedRow>& rows);

// Of rows [first, first + count) whose keys are here, k [count, head_dim] of one KV head.
void AttendedHere(const QueryTrace& trace, Layer layer, KvHead head, const AttentionShape& shape,
                  Position first, int64_t count, const float* k, std::vector<AttendedRow>& rows);

}  // namespace carrel::decoder
