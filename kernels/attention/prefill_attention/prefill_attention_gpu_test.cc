#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"
#include "kernels/gpu_test_data.h"

namespace carrel::kernels {
namespace {

using Variant = PrefillAttentionVariant;

struct Shape {
  int64_t n, first, rows;
  int32_t q_heads, kv_heads, head_dim;
  float sigma = 1.0f;  // of the queries
  bool room = false;
};

class PrefillAttentionGpuTest : public GpuKernelTest, public testing::WithParamInterface<Variant> {
 protected:
  bool Runs(int32_t head_dim) { return PrefillAttentionHas(GetParam(), head_dim); }

  // Checks `tokens` of the output, all if there are no more; keys past `rows` are NaN.
  void ExpectMatches(const Shape& s, int64_t tokens, float key_offset = 0) {
    SCOPED_TRACE(testing::Message() << "n " << s.n << " first " << s.first << " rows " << s.rows
                                    << " heads " << s.q_heads << "/" << s.kv_heads << " head_dim "
                                    << s.head_dim << " sigma " << s.sigma << " room " << s.room);
    const int64_t stride = (s.rows + 3) * s.head_dim, width = int64_t{s.q_heads} * s.head_dim;
    const std::vector<uint16_t> q = RandomBf16(rng_, s.n * width, s.sigma);
    std::vector<uint16_t> k = RandomBf16(rng_, s.kv_heads * stride);
    std::vector<uint16_t> v = RandomBf16(rng_, s.kv_heads * stride);
    for (uint16_t& x : k) x = FloatToBf16(Bf16ToFloat(x) + key_offset);
    for (int64_t g = 0; g < s.kv_heads; ++g) {
      std::fill_n(k.begin() + g * stride + s.rows * s.head_dim, 3 * s.head_dim, 0x7fc0);
      std::fill_n(v.begin() + g * stride + s.rows * s.head_dim, 3 * s.head_dim, 0x7fc0);
    }
    const DeviceInput<uint16_t> dq(q), dk(k), dv(v);
    const DeviceOutput<uint16_t> out(s.n * width);
    const DeviceOutput<float> exact(s.n * width), lse(s.n * s.q_heads);
    PrefillAttentionCudaParams p;
    p.n = s.n;
    p.first_position = s.first;
    p.rows = s.rows;
    p.q_heads = s.q_heads;
    p.kv_heads = s.kv_heads;
    p.head_dim = s.head_dim;
    p.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    PrefillAttentionCudaParams on_device = p;
    on_device.q = dq.data();
    on_device.kv = {dk.data(), dv.data(), s.rows + 3};
    on_device.out = out.data();
    on_device.out_exact = exact.data();
    on_device.lse = lse.data();
    const DeviceOutput<float> room(
        std::max(int64_t{1}, PrefillAttentionRoom(s.n, s.rows, s.q_heads, s.head_dim)));
    if (s.room) on_device.room = room.data();
    ASSERT_EQ(cudaSuccess, PrefillAttentionCuda(on_device, nullptr, GetParam()));
    const std::vector<float> got = exact.Get(), got_lse = lse.Get();
    EXPECT_EQ(out.Get(), Round(got));
    p.q = q.data();
    p.kv = {k.data(), v.data(), s.rows + 3};
    std::vector<float> want(static_cast<size_t>(width)), want_lse(static_cast<size_t>(s.q_heads));
    double error = 0, norm = 0;
    for (int64_t i = 0; i < std::min(tokens, s.n); ++i) {
      const int64_t token = tokens >= s.n ? i : i == 0 ? s.n - 1 : Below(s.n);
      RefPrefillAttentionCuda(p, token, want.data(), want_lse.data());
      for (int64_t c = 0; c < width; ++c) {
        const double value = got[token * width + c];
        ASSERT_TRUE(std::isfinite(value)) << "token " << token << " column " << c;
        error += (value - want[c]) * (value - want[c]);
        norm += double{want[c]} * want[c];
      }
      for (int32_t h = 0; h < s.q_heads; ++h) {
        const float value = got_lse[token * s.q_heads + h];
        if (value == want_lse[h]) continue;  // both -inf
        ASSERT_NEAR(value, want_lse[h], 1e-3 + 1e-5 * std::fabs(want_lse[h])) << "token " << token;
      }
    }
    // Weights are rounded to bf16 before they meet V.
    EXPECT_LE(std::sqrt(error), 5e-3 * std::sqrt(norm) + 1e-6);
  }
};

TEST_P(PrefillAttentionGpuTest, RandomShapes_MatchReference) {
  for (int trial = 0; trial < 40; ++trial) {
    const int32_t dims[] = {64, 128, 32, 16, 96};
    const int32_t head_dim = dims[trial % 5];
    if (!Runs(head_dim)) continue;
    const int32_t kv_heads = static_cast<int32_t>(1 + Below(3));
    const int32_t group = static_cast<int32_t>(1 + Below(4));
    const int64_t n = 1 + Below(300), first = trial % 3 == 0 ? 0 : Below(700);
    ExpectMatches({n, first, first + n, kv_heads * group, kv_heads, head_dim}, 40);
  }
}

TEST_P(PrefillAttentionGpuTest, EdgesOfTiles_MatchReference) {
  for (int32_t head_dim : {64, 128}) {
    if (!Runs(head_dim)) continue;
    for (int64_t n : {1, 63, 64, 65, 127, 128, 129, 256}) {
      for (int64_t first : {0, 1, 127, 128}) {
        ExpectMatches({n, first, first + n, 2, 1, head_dim}, 1000);
      }
    }
  }
}

TEST_P(PrefillAttentionGpuTest, ManyKeys_MatchReference) {
  for (int32_t head_dim : {64, 128}) {
    if (Runs(head_dim)) ExpectMatches({200, 9000, 9200, 8, 2, head_dim}, 12);
  }
}

TEST_P(PrefillAttentionGpuTest, KeysInParts_MatchReference) {
  for (int trial = 0; trial < 30; ++trial) {
    const int32_t head_dim = trial % 2 == 0 ? 64 : 128;
    const int32_t kv_heads = static_cast<int32_t>(1 + Below(3));
    const int32_t q_heads = kv_heads * static_cast<int32_t>(1 + Below(7));
    const int64_t n = 1 + Below(trial % 3 == 0 ? 250 : 40), first = Below(9000);
    const bool causal = trial % 4 != 0;
    ExpectMatches({n, first, causal ? first + n : first, q_heads, kv_heads, head_dim, 1.0f, true},
                  12);
  }
  // Parts that begin behind what the first tokens see.
  ExpectMatches({250, 10, 260 + 300, 2, 1, 64, 1.0f, true}, 1000);
  ExpectMatches({40, 0, 4000, 2, 1, 64, 1.0f, true}, 1000);
}

TEST(PrefillAttentionPartsTest, FewTokensOverManyRows_AreCut_AndOthersAreNot) {
  EXPECT_EQ(PrefillAttentionParts(25, 26000, 14), 19);
  EXPECT_EQ(PrefillAttentionParts(25, 600, 14), 2);
  EXPECT_EQ(PrefillAttentionParts(25, 200, 14), 1);
  EXPECT_EQ(PrefillAttentionParts(256, 1 << 20, 2), kMaxPrefillParts);
  EXPECT_EQ(PrefillAttentionParts(4096, 1 << 20, 32), 1);
  EXPECT_EQ(PrefillAttentionRoom(4096, 1 << 20, 32, 128), 0);
  EXPECT_EQ(PrefillAttentionRoom(25, 26000, 14, 64), 19 * 25 * 14 * 65);
}

TEST_P(PrefillAttentionGpuTest, NoMask_EveryTokenSeesEveryRow) {
  for (int64_t rows : {1, 100, 128, 1000}) {
    if (Runs(64)) ExpectMatches({70, rows, rows, 4, 2, 64}, 1000);
  }
}

TEST_P(PrefillAttentionGpuTest, PeakedAndVeryNegativeLogits_MatchReference) {
  for (int32_t head_dim : {64, 128}) {
    if (!Runs(head_dim)) continue;
    ExpectMatches({150, 300, 450, 4, 2, head_dim, 30.0f}, 40);
    ExpectMatches({150, 300, 450, 4, 2, head_dim, 100.0f}, 40, -20.0f);  // logits of -1e4 and below
  }
}

TEST_P(PrefillAttentionGpuTest, NoTokensOrRows_IsTheEmptySet) {
  if (!Runs(64)) GTEST_SKIP() << "no such variant here";
  ExpectMatches({3, 0, 0, 2, 1, 64}, 10);
  const DeviceOutput<uint16_t> out(64);
  PrefillAttentionCudaParams p;
  p.kv_heads = p.q_heads = 1;
  p.head_dim = 64;
  p.out = out.data();
  EXPECT_EQ(cudaSuccess, PrefillAttentionCuda(p, nullptr, GetParam()));
  for (uint16_t x : out.Get()) ASSERT_EQ(x, 0xffff);
}

TEST_P(PrefillAttentionGpuTest, HeadDimWithoutKernel_IsRefused) {
  PrefillAttentionCudaParams p;
  p.kv_heads = p.q_heads = 1;
  p.n = 1;
  p.head_dim = 80;
  EXPECT_EQ(cudaErrorInvalidValue, PrefillAttentionCuda(p, nullptr, GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Variants, PrefillAttentionGpuTest,
                         testing::Values(Variant::kAuto, Variant::kMma, Variant::kWgmma),
                         [](const auto& info) {
                           return std::string(info.param == Variant::kAuto  ? "Auto"
                                              : info.param == Variant::kMma ? "Mma"
                                                                            : "Wgmma");
                         });

}  // namespace
}  // namespace carrel::kernels
