// What: one token's attention for the tests of window_attention, sparse_attention and merge_states
//       on the GPU: random queries and rows, and what the double-precision reference makes of them.
#pragma once

#include "kernels/attention/window_attention/window_attention.h"
#include "kernels/gpu_test_data.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct DecodeShape {
  int64_t kv_heads = 1;
  int64_t group = 1;
  int64_t head_dim = 64;
  int64_t row_stride = 0;

  std::string Name() const {
    return "kv_heads " + std::to_string(kv_heads) + " group " + std::to_string(group) +
           " head_dim " + std::to_string(head_dim) + " row_stride " + std::to_string(row_stride);
  }
};

struct AttentionResult {
  std::vector<float> out, lse;
};

struct DecodeCase {
  DecodeCase(std::mt19937_64& rng, const DecodeShape& s, float sigma = 1.0f)
      : shape(s),
        q(RandomBf16(rng, s.kv_heads * s.group * s.head_dim, sigma)),
        k(RandomBf16(rng, s.kv_heads * s.row_stride * s.head_dim)),
        v(RandomBf16(rng, s.kv_heads * s.row_stride * s.head_dim)) {}

  // rows[g]: those that KV head g attends to.
  AttentionResult Expected(const std::vector<std::vector<int32_t>>& rows) const {
    const int64_t d = shape.head_dim, group = shape.group;
    AttentionResult r;
    r.out.resize(static_cast<size_t>(shape.kv_heads * group * d));
    r.lse.resize(static_cast<size_t>(shape.kv_heads * group));
    for (int64_t g = 0; g < shape.kv_heads; ++g) {
      std::vector<float> chosen_k, chosen_v;
      for (int32_t j : rows[static_cast<size_t>(g)]) {
        for (int64_t c = 0; c < d; ++c) {
          const auto at = static_cast<size_t>((g * shape.row_stride + j) * d + c);
          chosen_k.push_back(Bf16ToFloat(k[at]));
          chosen_v.push_back(Bf16ToFloat(v[at]));
        }
      }
      const std::vector<float> wide_q = Widen(q.data() + g * group * d, group * d);
      RefWindowAttention({.q = wide_q.data(),
                          .group = group,
                          .k = chosen_k.data(),
                          .v = chosen_v.data(),
                          .rows = static_cast<int64_t>(rows[static_cast<size_t>(g)].size()),
                          .head_dim = d,
                          .scale = scale,
                          .out = r.out.data() + g * group * d,
                          .lse = r.lse.data() + g * group});
    }
    return r;
  }

  std::vector<std::vector<int32_t>> FirstRows(int64_t rows) const {
    std::vector<int32_t> all(static_cast<size_t>(rows));
    for (int64_t j = 0; j < rows; ++j) all[static_cast<size_t>(j)] = static_cast<int32_t>(j);
    return std::vector<std::vector<int32_t>>(static_cast<size_t>(shape.kv_heads), all);
  }

  DecodeShape shape;
  std::vector<uint16_t> q, k, v;
  float scale = 0.125f;
};

// The same with its inputs on the device, and outputs.
struct DeviceDecodeCase {
  explicit DeviceDecodeCase(const DecodeCase& c)
      : q(c.q),
        k(c.k),
        v(c.v),
        out(c.shape.kv_heads * c.shape.group * c.shape.head_dim),
        lse(c.shape.kv_heads * c.shape.group),
        row_stride(c.shape.row_stride) {}
  KvView kv() const { return {k.data(), v.data(), row_stride}; }
  AttentionResult Get() const { return {out.Get(), lse.Get()}; }
  void Poison() {
    out.Poison();
    lse.Poison();
  }

  DeviceInput<uint16_t> q, k, v;
  DeviceOutput<float> out, lse;
  int64_t row_stride;
};

// fp32 scores of magnitude m carry an error of some m * 2^-23 into the weights.
inline void ExpectNear(const AttentionResult& result, const AttentionResult& expected,
                       double tolerance = kAttentionTolerance) {
  ExpectAttentionNear(result.out, expected.out, tolerance);
  ExpectLseNear(result.lse, expected.lse);
}

}  // namespace carrel::kernels
