// What:   what one layer leaves behind when every token has passed it, as it will be stored.
// Shapes: k, v [kv_heads] of [tokens, head_dim] bf16; queries [kv_heads] of [samples, group,
//         head_dim] f32 at sample_positions, after RoPE; query_drift [q_heads, head_dim] f32;
//         entering [recheck positions, hidden_size] f32.
// Ownership: a RowArray owns its memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/ids.h"
#include "common/status.h"

namespace carrel::prefill {

// Rows of one head: an array of its own, or a part of memory that it keeps alive (pinned memory
// into which a GPU copied them).
class RowArray {
 public:
  RowArray() = default;
  explicit RowArray(size_t size) : RowArray(std::vector<uint16_t>(size)) {}
  RowArray(std::vector<uint16_t> own)  // NOLINT: the common case reads as an assignment
      : own_(std::move(own)), data_(own_.data()), size_(own_.size()) {}
  RowArray(uint16_t* data, size_t size, std::shared_ptr<void> owner)
      : owner_(std::move(owner)), data_(data), size_(size) {}
  RowArray(RowArray&&) = default;  // a moved vector keeps its address
  RowArray& operator=(RowArray&&) = default;

  // Of an array of its own.
  void resize(size_t size) {
    CARREL_CHECK(owner_ == nullptr);
    own_.resize(size);
    data_ = own_.data();
    size_ = size;
  }
  uint16_t* data() { return data_; }
  const uint16_t* data() const { return data_; }
  size_t size() const { return size_; }
  uint16_t& operator[](size_t i) { return data_[i]; }
  const uint16_t& operator[](size_t i) const { return data_[i]; }

 private:
  std::vector<uint16_t> own_;
  std::shared_ptr<void> owner_;
  uint16_t* data_ = nullptr;
  size_t size_ = 0;
};

// What the probe (model/tokenizer/probe.h), whose tokens stand behind the document's, leaves of a
// layer: fidelity is measured on it, and nothing of it is stored.
struct ProbeRows {
  int64_t tokens = 0;
  std::vector<std::vector<uint16_t>> k, v;  // [kv_heads] of [tokens, head_dim] bf16
  std::vector<std::vector<float>> queries;  // [kv_heads] of [tokens, group, head_dim]
};

struct LayerRows {
  Layer layer;
  std::vector<RowArray> k;
  std::vector<RowArray> v;
  std::vector<std::vector<float>> queries;
  std::vector<Position> sample_positions;
  // What this layer's predicted queries lack, before RoPE, mean over kDriftTokens; empty: not
  // known. (A predicted query is the layer's projection of what entered the layer before.)
  std::vector<float> query_drift;
  // [kv_heads] summaries that were made of these very rows; empty: they are to be made.
  std::vector<std::string> summaries;
  // What entered the layer, of the tokens that are to be computed again (recheck.h). Not published.
  std::vector<float> entering;
  ProbeRows probe;
};

// Tokens of a document, evenly spread, of which the drift is the mean: it stands out from their
// spread, and they cost little.
inline constexpr int64_t kDriftTokens = 256;

// Evenly spread over the document, one per equal stretch: min(samples, tokens) positions,
// ascending.
std::vector<Position> SamplePositions(int64_t tokens, int64_t samples);

}  // namespace carrel::prefill
