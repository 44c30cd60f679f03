#include "kernels/attention/block_sparse_attention/block_sparse_attention.h"
#include "kernels/block_test_data.h"

namespace carrel::kernels {
namespace {

struct Shape {
  int64_t kv_heads, group, head_dim;
  BlockLayout layout;
  bool moved = false;
  int64_t length = 8;     // of a chosen stretch; 0: everything is chosen
  float sigma = 1;        // of the queries
  int64_t positions = 0;  // of the table; 0: enough
};

class BlockSparseAttentionGpuTest : public GpuKernelTest {
 protected:
  void ExpectMatches(const Shape& s, int64_t checked) {
    SCOPED_TRACE(testing::Message()
                 << "kv_heads " << s.kv_heads << " group " << s.group << " head_dim " << s.head_dim
                 << " first " << s.layout.first_position << " n " << s.layout.n << " block_q "
                 << s.layout.block_q << " sink " << s.layout.sink_tokens << " window "
                 << s.layout.window << " moved " << s.moved << " length " << s.length << " sigma "
                 << s.sigma);
    const int64_t tokens = s.layout.first_position + s.layout.n, width = s.group * s.head_dim;
    const int64_t head_elements = (tokens + 3) * s.head_dim,
                  count = s.layout.n * s.kv_heads * width;
    const std::vector<uint16_t> q = RandomBf16(rng_, count, s.sigma);
    std::vector<uint16_t> k = RandomBf16(rng_, s.kv_heads * head_elements);
    std::vector<uint16_t> v = RandomBf16(rng_, s.kv_heads * head_elements);
    for (int64_t g = 0; g < s.kv_heads; ++g) {  // nobody may read what lies beyond the last token
      std::fill_n(k.begin() + g * head_elements + tokens * s.head_dim, 3 * s.head_dim, 0x7fc0);
      std::fill_n(v.begin() + g * head_elements + tokens * s.head_dim, 3 * s.head_dim, 0x7fc0);
    }
    std::vector<int32_t> begins;
    std::vector<ChosenRowsHead> heads;
    const int64_t stride = Choose(s, begins, heads);
    const int64_t positions = s.positions == 0 ? tokens : s.positions;
    const std::vector<float> angles = TurnAngles(positions, s.head_dim);
    const DeviceInput<uint16_t> dq(q), dk(k), dv(v);
    const DeviceInput<float> device_angles(angles);
    const DeviceInput<int32_t> device_begins(begins), device_heads(Flat(heads));
    const DeviceOutput<uint16_t> out(count);
    const DeviceOutput<float> exact(count);
    BlockSparseAttentionParams p{.layout = s.layout,
                                 .q = dq.data(),
                                 .kv = {dk.data(), dv.data(), tokens + 3},
                                 .kv_heads = s.kv_heads,
                                 .group = s.group,
                                 .head_dim = s.head_dim,
                                 .scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim)),
                                 .out = out.data(),
                                 .out_exact = exact.data()};
    p.chosen = {device_begins.data(), stride,
                reinterpret_cast<ChosenRowsHead*>(device_heads.data())};
    if (s.moved) p.table = {device_angles.data(), positions};
    ASSERT_EQ(cudaSuccess, BlockSparseAttention(p, nullptr));
    const std::vector<float> got = exact.Get();
    ASSERT_EQ(out.Get(), Round(got));
    for (const float x : got) ASSERT_TRUE(std::isfinite(x));

    p.q = q.data();
    p.kv = {k.data(), v.data(), tokens + 3};
    p.chosen = {begins.data(), stride, heads.data()};
    if (s.moved) p.table = {angles.data(), positions};
    double error = 0, norm = 0;
    std::vector<float> want(static_cast<size_t>(width));
    for (int64_t i = 0; i < checked; ++i) {
      const int64_t token = i == 0 ? s.layout.n - 1 : Below(s.layout.n);
      const int64_t head = Below(s.kv_heads);
      RefBlockSparseAttention(p, token, head, want.data());
      const int64_t at = (token * s.kv_heads + head) * width;
      for (int64_t c = 0; c < width; ++c) {
        error += (got[at + c] - want[c]) * (got[at + c] - want[c]);
        norm += double{want[c]} * want[c];
      }
    }
    EXPECT_LE(std::sqrt(error), 5e-3 * std::sqrt(norm) + 1e-6);
  }

 private:
  // Some of the zone of each unit, in stretches that lie anywhere. Returns the stride of begins.
  int64_t Choose(const Shape& s, std::vector<int32_t>& begins, std::vector<ChosenRowsHead>& heads) {
    const int64_t blocks = s.layout.blocks();
    const int64_t stride =
        s.length == 0 ? 1 : s.layout.zone_rows(blocks - 1) / s.length + 1 + Below(4);
    begins.assign(static_cast<size_t>(blocks * s.kv_heads * stride), -1);
    for (int64_t unit = 0; unit < blocks * s.kv_heads; ++unit) {
      const int64_t block = unit / s.kv_heads;
      int32_t* const of_unit = &begins[static_cast<size_t>(unit * stride)];
      const auto zone = static_cast<int32_t>(s.layout.zone_rows(block));
      const auto sink = static_cast<int32_t>(s.layout.sink(block));
      if (s.length == 0) {
        of_unit[0] = sink;
        heads.push_back({zone > 0 ? 1 : 0, zone, zone});
        continue;
      }
      ChosenRowsHead head{0, static_cast<int32_t>(s.length), 0};
      for (int32_t at = 0; at < zone; at += head.length) {
        if (Below(3) != 0) continue;
        of_unit[head.count++] = sink + at;
        head.rows += std::min(head.length, zone - at);
      }
      heads.push_back(head);
    }
    return stride;
  }
};

TEST_F(BlockSparseAttentionGpuTest, RandomShapes_MatchReference) {
  for (int64_t trial = 0; trial < 40; ++trial) {
    const int64_t block_q = trial % 8 == 0 ? 1 + Below(30) : int64_t{16} << Below(4);
    ExpectMatches({.kv_heads = 1 + Below(3),
                   .group = 1 + Below(5),
                   .head_dim = trial % 2 == 0 ? 64 : 128,
                   .layout = {.first_position = block_q * Below(10),
                              .n = 1 + Below(4 * block_q),
                              .block_q = block_q,
                              .sink_tokens = Below(70),
                              .window = Below(150)},
                   .moved = trial % 3 == 0,
                   .length = trial % 4 == 0 ? 0 : 1 + Below(40)},
                  20);
  }
}

TEST_F(BlockSparseAttentionGpuTest, DefaultsOfPrefill_MatchReference) {
  for (const bool moved : {false, true}) {
    ExpectMatches({.kv_heads = 3,
                   .group = 3,
                   .head_dim = 64,
                   .layout = {.first_position = 64 * 150,
                              .n = 200,
                              .block_q = 64,
                              .sink_tokens = 256,
                              .window = 1024},
                   .moved = moved},
                  12);
  }
}

TEST_F(BlockSparseAttentionGpuTest, FirstBlocksOfADocument_MatchReference) {
  ExpectMatches({.kv_heads = 2,
                 .group = 4,
                 .head_dim = 64,
                 .layout = {.n = 300, .block_q = 64, .sink_tokens = 100, .window = 50},
                 .moved = true},
                60);
}

// As a decoder asks: every token a block of its own behind a zone that ends for all of them at once,
// also where more rows are attended than there are positions.
TEST_F(BlockSparseAttentionGpuTest, TokensOfADecoder_MatchReference) {
  for (const int64_t positions : {4000, 500}) {
    ExpectMatches(
        {.kv_heads = 3,
         .group = 3,
         .head_dim = 64,
         .layout =
             {.first_position = 3000, .n = 5, .block_q = 1, .sink_tokens = 4, .zone_limit = 2936},
         .moved = true,
         .positions = positions},
        5);
  }
}

TEST_F(BlockSparseAttentionGpuTest, PeakedLogits_MatchReference) {
  ExpectMatches({.kv_heads = 2,
                 .group = 2,
                 .head_dim = 128,
                 .layout = {.first_position = 640, .n = 64, .block_q = 32, .sink_tokens = 4},
                 .length = 3,
                 .sigma = 30},
                20);
}

TEST_F(BlockSparseAttentionGpuTest, UnservedShapes_AreRefused) {
  BlockSparseAttentionParams p{.layout = {.first_position = 64, .n = 64, .block_q = 64},
                               .kv_heads = 1,
                               .group = 1,
                               .head_dim = 96};
  EXPECT_EQ(BlockSparseAttention(p, nullptr), cudaErrorInvalidValue);
  p.head_dim = 64;
  p.layout.block_q = 0;
  EXPECT_EQ(BlockSparseAttention(p, nullptr), cudaErrorInvalidValue);
  p.layout.block_q = 64;
  p.layout.first_position = 32;
  EXPECT_EQ(BlockSparseAttention(p, nullptr), cudaErrorInvalidValue);
  p.layout = {.block_q = 64};
  EXPECT_EQ(BlockSparseAttention(p, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace carrel::kernels
