#include "kernels/gpu_test_data.h"
#include "kernels/group_score/group_score.h"
#include "kernels/group_score/group_score_cuda.h"

namespace carrel::kernels {
namespace {

class GroupScoreGpuTest : public GpuKernelTest {
 protected:
  void ExpectMatchesReference(int64_t kv_heads, int64_t group, int64_t n, float sigma) {
    SCOPED_TRACE("kv_heads " + std::to_string(kv_heads) + " group " + std::to_string(group) +
                 " n " + std::to_string(n) + " sigma " + std::to_string(sigma));
    const int64_t stride = (n + 3) / 4 * 4 + 4 * Below(3);
    std::vector<float> scores = RandomNormal(rng_, kv_heads * group * stride, sigma);
    for (int64_t i = 0; i < kv_heads * group; ++i) {  // heads differ in size
      const float offset = 30.0f * static_cast<float>(i % 5);
      for (int64_t j = 0; j < stride; ++j) {
        float& x = scores[static_cast<size_t>(i * stride + j)];
        x = j < n ? x - offset : INFINITY;  // not to be read
      }
    }
    const DeviceInput<float> input(scores);
    DeviceOutput<float> out(kv_heads * stride);
    const DeviceWorkspace workspace(GroupScoreWorkspaceBytes(kv_heads, group));
    ASSERT_EQ(cudaSuccess, GroupScoreCuda({.scores = input.data(),
                                           .kv_heads = kv_heads,
                                           .group = group,
                                           .n = n,
                                           .score_stride = stride,
                                           .out = out.data(),
                                           .out_stride = stride,
                                           .workspace = workspace.data()},
                                          nullptr));
    const std::vector<float> found = out.Get();
    std::vector<float> expected(static_cast<size_t>(n)), base(static_cast<size_t>(group));
    for (int64_t g = 0; g < kv_heads; ++g) {
      const float* of_group = scores.data() + g * group * stride;
      for (int64_t h = 0; h < group; ++h) {
        base[static_cast<size_t>(h)] = static_cast<float>(RefLogSumExp(of_group + h * stride, n));
      }
      RefGroupScore(of_group, group, n, stride, base.data(), expected.data());
      for (int64_t j = 0; j < n; ++j) {
        const float value = found[static_cast<size_t>(g * stride + j)];
        const float want = expected[static_cast<size_t>(j)];
        ASSERT_NEAR(value, want, 2e-5 * std::max(1.0f, std::abs(want) + 3 * sigma));
      }
      for (int64_t j = n; j < stride; ++j) {
        ASSERT_TRUE(std::isnan(found[static_cast<size_t>(g * stride + j)])) << "written beyond n";
      }
    }
  }
};

TEST_F(GroupScoreGpuTest, RandomShapes_MatchReference) {
  for (int64_t trial = 0; trial < 30; ++trial) {
    ExpectMatchesReference(1 + Below(5), 1 + Below(16), 1 + Below(trial % 5 == 0 ? 70000 : 500),
                           trial % 3 == 0 ? 100.0f : 3.0f);
  }
}

TEST_F(GroupScoreGpuTest, Largest_1MRows_MatchesReference) {
  ExpectMatchesReference(2, 4, (1 << 20) - 3, 3.0f);
}

TEST_F(GroupScoreGpuTest, UnservedShapes_AreRefused) {
  EXPECT_EQ(GroupScoreCuda({.kv_heads = 1, .group = 17}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(GroupScoreCuda({.kv_heads = 1, .group = 1, .n = 2, .score_stride = 6}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(GroupScoreCuda({.kv_heads = 1, .group = 1}, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace carrel::kernels
