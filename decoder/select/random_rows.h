// What: rows for the tests of selectors on the CPU and on the GPU. Tests only.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "common/bf16.h"
#include "common/dtype.h"
#include "common/test_util.h"
#include "decoder/select/host_rows.h"

namespace carrel::decoder {

// Random bf16 rows of every head, in segments, with random codes of 64 bits. Directions are bf16
// numbers, as a GPU has them.
class RandomRows final : public HostRows {
 public:
  RandomRows(std::mt19937_64& rng, const AttentionShape& shape, int64_t tokens, int64_t segment)
      : shape_(shape), tokens_(tokens) {
    for (int i = 0; i < shape.layers * shape.kv_heads; ++i) {
      Head head;
      head.k.resize(static_cast<size_t>(tokens * shape.head_dim));
      head.v.resize(head.k.size());
      FloatToBf16(RandomNormal(rng, tokens * shape.head_dim, 2.0f), head.k.data());
      FloatToBf16(RandomNormal(rng, tokens * shape.head_dim), head.v.data());
      head.queries = RandomNormal(rng, 7 * shape.group() * shape.head_dim);
      head.codes.bits = 64;
      head.codes.directions = RandomNormal(rng, 64 * shape.head_dim);
      for (float& x : head.codes.directions) x = Bf16ToFloat(FloatToBf16(x));
      head.codes.decoder = RandomNormal(rng, 64 * shape.head_dim, 0.25f);
      for (float& x : head.codes.decoder) x = Bf16ToFloat(FloatToBf16(x));
      for (int64_t j = 0; j < tokens * 2; ++j) {
        head.codes.words.push_back(static_cast<uint32_t>(rng()));
      }
      heads_.push_back(std::move(head));
    }
    for (Head& head : heads_) {
      head.rows.segment_rows = segment;
      head.rows.row_bytes = shape.head_dim * 2;
      for (int64_t at = 0; at < tokens; at += segment) {
        const auto offset = static_cast<size_t>(at * shape.head_dim);
        head.rows.k_segments.push_back(reinterpret_cast<const char*>(&head.k[offset]));
        head.rows.v_segments.push_back(reinterpret_cast<const char*>(&head.v[offset]));
      }
    }
  }

  const AttentionShape& shape() const { return shape_; }
  int64_t tokens() const override { return tokens_; }
  const HeadView& At(Layer layer, KvHead head) const override { return Of(layer, head).rows; }
  absl::StatusOr<std::vector<float>> SampledQueries(Layer layer, KvHead head) const override {
    if (no_queries) return absl::NotFoundError("none are stored");
    return Of(layer, head).queries;
  }
  absl::StatusOr<HeadCodes> StoredCodes(Layer layer, KvHead head) const override {
    if (no_codes) return absl::NotFoundError("no codes are stored");
    return Of(layer, head).codes;
  }
  float Key(Layer layer, KvHead head, Position row, int64_t c) const {
    float value;
    WidenToFloat(DType::kBf16, &Of(layer, head).k[static_cast<size_t>(row * shape_.head_dim + c)],
                 1, &value);
    return value;
  }
  float Value(Layer layer, KvHead head, Position row, int64_t c) const {
    float value;
    WidenToFloat(DType::kBf16, &Of(layer, head).v[static_cast<size_t>(row * shape_.head_dim + c)],
                 1, &value);
    return value;
  }
  // Sets a key.
  void SetKey(Layer layer, KvHead head, Position row, const std::vector<float>& key) {
    Head& of = heads_[static_cast<size_t>(layer.value() * shape_.kv_heads + head.value())];
    FloatToBf16(key, &of.k[static_cast<size_t>(row * shape_.head_dim)]);
  }

  bool no_queries = false, no_codes = false;

 private:
  struct Head {
    std::vector<uint16_t> k, v;
    std::vector<float> queries;
    HeadCodes codes;
    HeadView rows;
  };
  const Head& Of(Layer layer, KvHead head) const {
    return heads_[static_cast<size_t>(layer.value() * shape_.kv_heads + head.value())];
  }
  const AttentionShape shape_;
  const int64_t tokens_;
  std::vector<Head> heads_;
};

}  // namespace carrel::decoder
