#include "kernels/gpu_test_data.h"
#include "kernels/select/argmax/argmax_cuda.h"

namespace carrel::kernels {
namespace {

class ArgmaxGpuTest : public GpuKernelTest {
 protected:
  void ExpectMatches(const std::vector<float>& logits, int64_t n, int64_t count) {
    std::vector<int32_t> want(static_cast<size_t>(n));
    RefArgmax(logits.data(), n, count, want.data());
    const DeviceInput<float> device(logits);
    const DeviceOutput<int32_t> id(n);
    ASSERT_EQ(cudaSuccess, ArgmaxCuda(device.data(), n, count, id.data(), nullptr));
    EXPECT_EQ(id.Get(), want);
  }
};

TEST_F(ArgmaxGpuTest, RandomLogitsWithTies_MatchReference) {
  for (int64_t count : {1, 31, 1024, 2049, 128256}) {
    const int64_t n = 1 + Below(4);
    std::vector<float> logits = RandomNormal(rng_, n * count);
    for (float& x : logits) x = std::round(2 * x);  // many ties
    ExpectMatches(logits, n, count);
  }
}

TEST_F(ArgmaxGpuTest, InfinitiesAndNan) {
  const float inf = INFINITY;
  ExpectMatches({-inf, -inf, -inf, 1, inf, inf, 0, NAN, 5}, 3, 3);
}

}  // namespace
}  // namespace carrel::kernels
