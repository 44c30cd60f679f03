#include <numeric>

#include "kernels/gpu_test_data.h"
#include "kernels/select/topk/topk.h"
#include "kernels/select/topk/topk_cuda.h"

namespace carrel::kernels {
namespace {

class TopKGpuTest : public GpuKernelTest {};

// In parts of ten trials, which take a sanitizer minutes: it can check them beside one another.
class TopKRandomGpuTest : public TopKGpuTest, public testing::WithParamInterface<int64_t> {
 protected:
  void SetUp() override {
    TopKGpuTest::SetUp();
    rng_.discard(static_cast<uint64_t>(GetParam()));
  }
};
INSTANTIATE_TEST_SUITE_P(FromTrial, TopKRandomGpuTest, testing::Range<int64_t>(0, 40, 10));

// scores [kv_heads, n]; a workspace may serve many calls. Those above the last come first.
void ExpectEqualsReference(const std::vector<float>& scores, int64_t kv_heads, int64_t k,
                           const DeviceWorkspace* shared = nullptr) {
  const int64_t n = static_cast<int64_t>(scores.size()) / kv_heads, stride = (n + 3) / 4 * 4;
  SCOPED_TRACE("kv_heads " + std::to_string(kv_heads) + " n " + std::to_string(n) + " k " +
               std::to_string(k));
  std::vector<float> padded(static_cast<size_t>(kv_heads * stride), INFINITY);  // not to be chosen
  for (int64_t g = 0; g < kv_heads; ++g) {
    std::copy_n(scores.begin() + g * n, n, padded.begin() + g * stride);
  }
  const DeviceInput<float> input(padded);
  DeviceOutput<int32_t> ids(kv_heads * k);
  const DeviceWorkspace own(shared != nullptr ? 0 : TopKWorkspaceBytes(kv_heads));
  ASSERT_EQ(cudaSuccess, TopKCuda({.scores = input.data(),
                                   .kv_heads = kv_heads,
                                   .n = n,
                                   .score_stride = stride,
                                   .k = k,
                                   .ids = ids.data(),
                                   .workspace = shared != nullptr ? shared->data() : own.data()},
                                  nullptr));
  const std::vector<int32_t> out = ids.Get();
  std::vector<int64_t> expected(static_cast<size_t>(k));
  for (int64_t g = 0; g < kv_heads; ++g) {
    const float* const of_head = scores.data() + g * n;
    const int64_t count = RefTopK(of_head, n, k, expected.data());
    const auto key = [&](int64_t j) { return std::isnan(of_head[j]) ? -INFINITY : of_head[j]; };
    const float last = count > 0 ? key(expected[static_cast<size_t>(count - 1)]) : 0;
    std::sort(expected.begin(), expected.begin() + count, [&](int64_t a, int64_t b) {
      const bool a_equals = key(a) == last, b_equals = key(b) == last;
      return a_equals != b_equals ? b_equals : a < b;
    });
    for (int64_t i = 0; i < k; ++i) {
      const auto at = static_cast<size_t>(g * k + i);
      if (i >= count) {
        ASSERT_EQ(out[at], -1) << "written beyond n";
        continue;
      }
      ASSERT_EQ(out[at], expected[static_cast<size_t>(i)]) << "head " << g << " place " << i;
    }
  }
}

TEST_P(TopKRandomGpuTest, AnyK_OneWorkspace_EqualsReference) {
  const DeviceWorkspace workspace(TopKWorkspaceBytes(3));
  for (int64_t trial = GetParam(); trial < GetParam() + 10; ++trial) {
    const int64_t n = 1 + Below(trial % 5 == 0 ? 60000 : 900);
    const int64_t k = Below(1 + (trial % 3 == 0 ? n + 5 : 130));
    ExpectEqualsReference(RandomNormal(rng_, 3 * n), 3, k, &workspace);
  }
}

TEST_F(TopKGpuTest, NarrowScores_EqualsReference) {
  // All in one bin of the first digit, and many alike.
  for (float width : {1e-3f, 1e-5f, 1e-6f}) {
    std::vector<float> scores = RandomNormal(rng_, 2 * 40000, width);
    for (float& x : scores) x += 100.0f;
    ExpectEqualsReference(scores, 2, 1500);
  }
}

TEST_P(TopKRandomGpuTest, ManyTiesAndSpecialValues_EqualsReference) {
  const float inf = INFINITY;
  const float values[] = {0.0f, -0.0f, 1.0f, -1.0f, inf, -inf, NAN, -NAN, 1e-40f, -1e-40f};
  for (int64_t trial = GetParam(); trial < GetParam() + 10; ++trial) {
    std::vector<float> scores(static_cast<size_t>(1 + Below(trial % 5 == 0 ? 50000 : 3000)));
    const int64_t kinds = 1 + Below(10);
    for (float& x : scores) x = values[Below(kinds)];
    ExpectEqualsReference(scores, 1, 1 + Below(400));
  }
}

TEST_F(TopKGpuTest, ScoresInOrder_EqualReference) {
  std::vector<float> scores(70011);
  std::iota(scores.begin(), scores.end(), -5000.0f);
  ExpectEqualsReference(scores, 1, 3000);
  std::reverse(scores.begin(), scores.end());
  ExpectEqualsReference(scores, 1, 3000);
}

TEST_F(TopKGpuTest, MoreHeadsThanSms_EqualsReference) {
  ExpectEqualsReference(RandomNormal(rng_, 200 * 777), 200, 50);
}

TEST_F(TopKGpuTest, NoneWantedOrGiven_WritesNothing) {
  ExpectEqualsReference({1.0f, 2.0f}, 1, 0);
  int32_t nowhere = 0;
  EXPECT_EQ(cudaSuccess, TopKCuda({.kv_heads = 1, .k = 4, .workspace = &nowhere}, nullptr));
}

TEST_F(TopKGpuTest, Largest_4096Of1M_EightHeads_EqualsReference) {
  ExpectEqualsReference(RandomNormal(rng_, 8 << 20), 8, 4096);
  ExpectEqualsReference(std::vector<float>(1 << 20, 0.5f), 1, 4096);
}

TEST_F(TopKGpuTest, UnservedShapes_AreRefused) {
  int32_t nowhere = 0;
  const TopKCudaParams good{
      .kv_heads = 1, .n = 0, .score_stride = 8, .k = 4, .workspace = &nowhere};
  const auto refused = [&](auto change) {
    TopKCudaParams params = good;
    change(params);
    EXPECT_EQ(TopKCuda(params, nullptr), cudaErrorInvalidValue);
  };
  refused([](auto& p) { p.score_stride = 7; });
  refused([](auto& p) { p.n = 9; });
  refused([](auto& p) { p.kv_heads = 0; });
  refused([](auto& p) { p.workspace = nullptr; });
}

}  // namespace
}  // namespace carrel::kernels
