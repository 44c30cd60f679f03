// What:   the rows that the decoder itself holds: sink and local of the context, bf16 as they arrive,
//         and everything prompted and generated since, fp32 as it was computed; of each layer and KV
//         head [rows, head_dim].
// Edge:   the order of rows does not matter to attention: keys carry their position (RoPE).
// Threads: one.
#pragma once

#include <cstdint>
#include <vector>

#include "common/ids.h"

namespace carrel::decoder {

class Window {
 public:
  explicit Window(const AttentionShape& shape);

  // Rows of the context, [rows, head_dim] bf16, unaligned. Before anything is appended to the
  // layer.
  void AddContextRows(Layer layer, KvHead kv_head, const void* k, const void* v, int64_t rows);
  // New tokens of a layer: k, v [n, kv_heads, head_dim].
  void Append(Layer layer, const float* k, const float* v, int64_t n);
  // Back to the rows of the context and the first `tokens` of what was appended.
  void Truncate(int64_t tokens = 0);
  // The first `tokens` that were appended: of each layer and KV head their keys, then their values.
  std::vector<float> Copy(int64_t tokens) const;
  // What Copy gave, instead of what was appended. False, and nothing changes: it is of another size.
  bool Restore(const std::vector<float>& rows, int64_t tokens);

  int64_t context_rows(Layer layer) const { return RowsOf(At(layer, KvHead(0)).context_k.size()); }
  const uint16_t* context_k(Layer layer, KvHead head) const {
    return At(layer, head).context_k.data();
  }
  const uint16_t* context_v(Layer layer, KvHead head) const {
    return At(layer, head).context_v.data();
  }
  // What was appended.
  int64_t rows(Layer layer) const { return RowsOf(At(layer, KvHead(0)).k.size()); }
  const float* k(Layer layer, KvHead head) const { return At(layer, head).k.data(); }
  const float* v(Layer layer, KvHead head) const { return At(layer, head).v.data(); }
  // The context's last rows that nobody attends to; they stay where they are.
  void set_given_up(int64_t rows) { given_up_ = rows; }
  int64_t given_up() const { return given_up_; }
  int64_t bytes() const;

 private:
  struct Head {
    std::vector<uint16_t> context_k, context_v;
    std::vector<float> k, v;
  };
  int64_t RowsOf(size_t numbers) const { return static_cast<int64_t>(numbers) / shape_.head_dim; }
  const Head& At(Layer layer, KvHead head) const {
    return heads_[static_cast<size_t>(layer.value()) * shape_.kv_heads + head.value()];
  }

  const AttentionShape shape_;
  std::vector<Head> heads_;
  int64_t given_up_ = 0;
};

}  // namespace carrel::decoder
