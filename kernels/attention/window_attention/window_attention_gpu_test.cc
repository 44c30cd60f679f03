#include <memory>

#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/decode_case.h"

namespace carrel::kernels {
namespace {

class WindowAttentionGpuTest : public GpuKernelTest {};

class Runner {
 public:
  explicit Runner(const DecodeCase& c, int64_t splits)
      : device(c),
        workspace_(
            DecodeWorkspaceBytes(c.shape.kv_heads, c.shape.group, c.shape.head_dim, splits)) {
    params = {.q = device.q.data(),
              .kv = device.kv(),
              .kv_heads = c.shape.kv_heads,
              .group = c.shape.group,
              .head_dim = c.shape.head_dim,
              .scale = c.scale,
              .out = device.out.data(),
              .lse = device.lse.data(),
              .splits = splits,
              .workspace = workspace_.data()};
  }
  AttentionResult Run(int64_t rows) {
    device.Poison();
    params.rows = rows;
    CARREL_EXPECT_CUDA(WindowAttentionCuda(params, nullptr));
    return device.Get();
  }

  DeviceDecodeCase device;
  WindowAttentionCudaParams params;

 private:
  DeviceWorkspace workspace_;
};

TEST_F(WindowAttentionGpuTest, RandomShapes_MatchReference) {
  for (int64_t trial = 0; trial < 60; ++trial) {
    const DecodeShape shape{.kv_heads = 1 + Below(5),
                            .group = 1 + Below(16),
                            .head_dim = trial % 2 == 0 ? 64 : 128,
                            .row_stride = 1 + Below(trial % 6 == 0 ? 3000 : 150)};
    const int64_t rows = 1 + Below(shape.row_stride);
    const int64_t splits = trial % 3 == 0 ? DecodeSplits(shape.row_stride, shape.kv_heads)
                                          : 1 + Below(trial % 5 == 0 ? 256 : 9);
    SCOPED_TRACE(shape.Name() + " rows " + std::to_string(rows) + " splits " +
                 std::to_string(splits));
    const DecodeCase c(rng_, shape);
    Runner runner(c, splits);
    const AttentionResult result = runner.Run(rows);
    ExpectNear(result, c.Expected(c.FirstRows(rows)));
    const AttentionResult again = runner.Run(rows);
    EXPECT_TRUE(SameBits(result.out, again.out)) << "the second call differs";
    EXPECT_TRUE(SameBits(result.lse, again.lse)) << "the second call differs";
  }
}

TEST_F(WindowAttentionGpuTest, EverySmallCount_MatchesReference) {
  const DecodeCase c(rng_, {.kv_heads = 2, .group = 4, .head_dim = 128, .row_stride = 140});
  Runner runner(c, 7);
  for (int64_t rows = 0; rows <= 140; rows += rows < 70 ? 1 : 7) {
    SCOPED_TRACE("rows " + std::to_string(rows));
    ExpectNear(runner.Run(rows), c.Expected(c.FirstRows(rows)));
  }
}

TEST_F(WindowAttentionGpuTest, PeakedLogits_MatchReference) {
  for (int64_t trial = 0; trial < 8; ++trial) {
    const DecodeCase c(rng_,
                       {.kv_heads = 2,
                        .group = trial % 2 == 0 ? 4 : 12,
                        .head_dim = trial % 4 < 2 ? 64 : 128,
                        .row_stride = 1 + Below(700)},
                       100.0f);
    Runner runner(c, 5);
    ExpectNear(runner.Run(c.shape.row_stride), c.Expected(c.FirstRows(c.shape.row_stride)));
  }
}

TEST_F(WindowAttentionGpuTest, LogitsNear1e4Below_AllAlike_AveragesRows) {
  DecodeCase c(rng_, {.kv_heads = 1, .group = 3, .head_dim = 64, .row_stride = 90});
  std::fill(c.q.begin(), c.q.end(), FloatToBf16(1.0f));
  std::fill(c.k.begin(), c.k.end(), FloatToBf16(-1250.0f));
  Runner runner(c, 3);
  const AttentionResult result = runner.Run(90);
  std::vector<float> mean(3 * 64);
  for (size_t i = 0; i < c.v.size(); ++i) {
    for (size_t h = 0; h < 3; ++h) mean[h * 64 + i % 64] += Bf16ToFloat(c.v[i]) / 90.0f;
  }
  ExpectAttentionNear(result.out, mean, 1e-5);
  const float logit = Bf16ToFloat(FloatToBf16(-1250.0f)) * 64 * 0.125f;
  for (float lse : result.lse) EXPECT_NEAR(lse, logit + std::log(90.0f), 2e-3);
}

TEST_F(WindowAttentionGpuTest, NoRows_OutZero_LseMinusInfinity) {
  const DecodeCase c(rng_, {.kv_heads = 3, .group = 5, .head_dim = 128, .row_stride = 4});
  Runner runner(c, 4);
  const AttentionResult result = runner.Run(0);
  for (float x : result.out) EXPECT_EQ(x, 0.0f);
  for (float x : result.lse) EXPECT_EQ(x, -INFINITY);
}

TEST_F(WindowAttentionGpuTest, RowsBeyondTheCount_AreNotRead) {
  DecodeCase c(rng_, {.kv_heads = 2, .group = 4, .head_dim = 128, .row_stride = 100});
  const int64_t rows = 37, d = 128;
  const AttentionResult expected = c.Expected(c.FirstRows(rows));
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t i = rows * d; i < 100 * d; ++i)
      c.k[g * 100 * d + i] = c.v[g * 100 * d + i] = 0xffff;
  }
  Runner runner(c, 3);
  ExpectNear(runner.Run(rows), expected);
}

TEST_F(WindowAttentionGpuTest, CapturedOnce_WindowGrows_EachReplayMatchesReference) {
  const DecodeCase c(rng_, {.kv_heads = 2, .group = 4, .head_dim = 128, .row_stride = 900});
  Runner runner(c, DecodeSplits(900, 2));
  DeviceInput<int32_t> row_count(std::vector<int32_t>{0});
  runner.params.row_count = row_count.data();
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CARREL_ASSERT_CUDA(cudaStreamCreate(&stream));
  CARREL_ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CARREL_ASSERT_CUDA(WindowAttentionCuda(runner.params, stream));
  CARREL_ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  CARREL_ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int32_t rows : {1, 17, 18, 400, 0, 899, 900}) {
    SCOPED_TRACE("rows " + std::to_string(rows));
    row_count.Set({rows});
    runner.device.Poison();
    CARREL_ASSERT_CUDA(cudaGraphLaunch(exec, stream));
    CARREL_ASSERT_CUDA(cudaStreamSynchronize(stream));
    ExpectNear(runner.device.Get(), c.Expected(c.FirstRows(rows)));
  }
  CARREL_EXPECT_CUDA(cudaGraphExecDestroy(exec));
  CARREL_EXPECT_CUDA(cudaGraphDestroy(graph));
  CARREL_EXPECT_CUDA(cudaStreamDestroy(stream));
}

// More sequences than a launch has room for, some of another shape, each with rows and parts of its own.
TEST_F(WindowAttentionGpuTest, SequencesTogether_EachHasTheBitsItHasAlone) {
  for (const int64_t sequences : {2, 33, 70}) {
    std::vector<std::unique_ptr<DecodeCase>> cases;
    std::vector<std::unique_ptr<Runner>> runners;
    std::vector<AttentionResult> alone;
    std::vector<WindowAttentionCudaParams> all;
    for (int64_t i = 0; i < sequences; ++i) {
      const DecodeShape shape{.kv_heads = i % 9 == 8 ? 3 : 2,
                              .group = 4,
                              .head_dim = i % 12 == 11 ? 64 : 128,
                              .row_stride = 1 + Below(600)};
      cases.push_back(std::make_unique<DecodeCase>(rng_, shape));
      runners.push_back(std::make_unique<Runner>(*cases.back(), 1 + Below(9)));
      alone.push_back(runners.back()->Run(Below(shape.row_stride + 1)));
      runners.back()->device.Poison();
      all.push_back(runners.back()->params);
    }
    CARREL_ASSERT_CUDA(WindowAttentionCuda(all, nullptr));
    for (size_t i = 0; i < alone.size(); ++i) {
      const AttentionResult together = runners[i]->device.Get();
      EXPECT_TRUE(SameBits(together.out, alone[i].out)) << i << " of " << sequences;
      EXPECT_TRUE(SameBits(together.lse, alone[i].lse)) << i << " of " << sequences;
    }
  }
}

TEST_F(WindowAttentionGpuTest, Largest_1MRows_MatchesReference) {
  const DecodeCase c(rng_, {.kv_heads = 1, .group = 2, .head_dim = 128, .row_stride = 1 << 20});
  Runner runner(c, DecodeSplits(1 << 20, 1));
  // Scores nearly alike: the output is an average of a million rows, and small.
  ExpectNear(runner.Run(1 << 20), c.Expected(c.FirstRows(1 << 20)));
}

TEST_F(WindowAttentionGpuTest, UnservedShapes_AreRefused) {
  const DecodeCase c(rng_, {.kv_heads = 1, .group = 1, .head_dim = 64, .row_stride = 4});
  Runner runner(c, 1);
  const auto refused = [&](auto change) {
    WindowAttentionCudaParams params = runner.params;
    change(params);
    EXPECT_EQ(WindowAttentionCuda(params, nullptr), cudaErrorInvalidValue);
  };
  refused([](auto& p) { p.head_dim = 96; });
  refused([](auto& p) { p.group = 17; });
  refused([](auto& p) { p.group = 0; });
  refused([](auto& p) { p.splits = 257; });
  refused([](auto& p) { p.splits = 0; });
  refused([](auto& p) { p.rows = 5; });
  refused([](auto& p) { p.scale = 0; });
  refused([](auto& p) { p.workspace = nullptr; });
}

}  // namespace
}  // namespace carrel::kernels
