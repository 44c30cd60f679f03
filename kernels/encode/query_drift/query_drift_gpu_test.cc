#include "kernels/encode/query_drift/query_drift.h"
#include "kernels/encode/query_drift/query_drift_cuda.h"
#include "kernels/gpu_test_data.h"

namespace carrel::kernels {
namespace {

class QueryDriftGpuTest : public GpuKernelTest {};

std::vector<float> InvFreq(int64_t head_dim) {
  std::vector<float> inv_freq;
  for (int64_t c = 0; c < head_dim / 2; ++c) {
    inv_freq.push_back(
        std::pow(500000.0f, -2.0f * static_cast<float>(c) / static_cast<float>(head_dim)));
  }
  return inv_freq;
}

TEST_F(QueryDriftGpuTest, RandomBlocks_MatchReference) {
  const int64_t dims[] = {64, 128, 2, 96, 256, 2048};
  for (int64_t trial = 0; trial < 36; ++trial) {
    const int64_t heads = 1 + Below(9), dim = dims[trial % 6], width = heads * dim;
    SCOPED_TRACE(testing::Message() << "heads " << heads << " head_dim " << dim);
    const std::vector<float> inv_freq = InvFreq(dim);
    const DeviceInput<float> dfreq(inv_freq);
    std::vector<float> expected = RandomNormal(rng_, width);
    int64_t expected_tokens = trial % 2 == 0 ? 0 : 4;
    if (expected_tokens == 0) std::fill(expected.begin(), expected.end(), 0.0f);
    const DeviceOutput<float> mean(width);
    const DeviceOutput<int32_t> tokens(heads);
    const std::vector<int32_t> counts(static_cast<size_t>(heads),
                                      static_cast<int32_t>(expected_tokens));
    CARREL_ASSERT_CUDA(
        cudaMemcpy(mean.data(), expected.data(), expected.size() * 4, cudaMemcpyHostToDevice));
    CARREL_ASSERT_CUDA(
        cudaMemcpy(tokens.data(), counts.data(), counts.size() * 4, cudaMemcpyHostToDevice));
    const int64_t first = Below(trial % 3 == 0 ? 1'000'000 : 1000);
    int64_t step = 0;
    for (const int64_t n : {Below(20), int64_t{1}, int64_t{0}, 1 + Below(300)}) {
      const std::vector<float> q = RandomNormal(rng_, n * width);
      const std::vector<float> predicted_q = RandomNormal(rng_, n * width);
      const DeviceInput<float> dq(q), dguess(predicted_q);
      const DeviceInput<int32_t> dstep({static_cast<int32_t>(step)});
      const float newest = trial % 4 == 0 ? 0.0f : 0.2f;
      CARREL_ASSERT_CUDA(LearnQueryDriftCuda({.q = dq.data(),
                                              .predicted_q = dguess.data(),
                                              .n = n,
                                              .heads = heads,
                                              .head_dim = dim,
                                              .first_position = first,
                                              .step = dstep.data(),
                                              .inv_freq = dfreq.data(),
                                              .newest = newest,
                                              .mean = mean.data(),
                                              .tokens = tokens.data()},
                                             nullptr));
      RefLearnQueryDrift({q.data(), predicted_q.data(), n, heads, dim, first + step,
                          inv_freq.data(), newest, expected.data(), &expected_tokens, nullptr});
      EXPECT_LE(RelativeError(mean.Get(), expected), 1e-4);
      EXPECT_EQ(tokens.Get(), std::vector<int32_t>(static_cast<size_t>(heads),
                                                   static_cast<int32_t>(expected_tokens)));
      step += n;
    }
  }
}

TEST_F(QueryDriftGpuTest, QueriesBeforeRope_AreNotTurned) {
  const std::vector<float> q = RandomNormal(rng_, 2 * 64), predicted_q = RandomNormal(rng_, 2 * 64);
  const DeviceInput<float> dq(q), dguess(predicted_q);
  const DeviceWorkspace mean(64 * 4), tokens(4);
  CARREL_ASSERT_CUDA(LearnQueryDriftCuda({.q = dq.data(),
                                          .predicted_q = dguess.data(),
                                          .n = 2,
                                          .heads = 1,
                                          .head_dim = 64,
                                          .first_position = 12345,
                                          .mean = static_cast<float*>(mean.data()),
                                          .tokens = static_cast<int32_t*>(tokens.data())},
                                         nullptr));
  std::vector<float> got(64), want(64);
  CARREL_ASSERT_CUDA(cudaMemcpy(got.data(), mean.data(), 64 * 4, cudaMemcpyDeviceToHost));
  for (size_t c = 0; c < 64; ++c)
    want[c] = (q[c] - predicted_q[c] + q[64 + c] - predicted_q[64 + c]) / 2;
  EXPECT_LE(RelativeError(got, want), 1e-5);
}

TEST_F(QueryDriftGpuTest, OddHeadDim_IsRefused) {
  EXPECT_EQ(cudaErrorInvalidValue,
            LearnQueryDriftCuda({.n = 1, .heads = 1, .head_dim = 63}, nullptr));
  EXPECT_EQ(cudaErrorInvalidValue,
            LearnQueryDriftCuda({.n = 1, .heads = 1, .head_dim = 2050}, nullptr));
}

}  // namespace
}  // namespace carrel::kernels
