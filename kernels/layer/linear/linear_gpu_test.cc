#include "kernels/gpu_test_data.h"
#include "kernels/half_test_data.h"
#include "kernels/layer/linear/linear_cuda.h"

namespace carrel::kernels {
namespace {

class LinearGpuTest : public GpuKernelTest {
 protected:
  void SetUp() override {
    auto linear = LinearCuda::Create(workspace_.data());
    ASSERT_TRUE(linear.ok()) << linear.status();
    linear_ = *std::move(linear);
  }

  void ExpectMatches(int64_t n, int64_t in, int64_t out, bool bias, bool accumulate,
                     HalfType type = HalfType::kBf16) {
    SCOPED_TRACE(testing::Message() << "n " << n << " in " << in << " out " << out << " bias "
                                    << bias << " accumulate " << accumulate);
    const bool half = type == HalfType::kF16;
    const std::vector<uint16_t> x = half ? RandomF16(rng_, n * in) : RandomBf16(rng_, n * in);
    const std::vector<uint16_t> w = half ? RandomF16(rng_, out * in) : RandomBf16(rng_, out * in);
    const auto wide = [half](uint16_t v) { return half ? F16ToFloat(v) : Bf16ToFloat(v); };
    const std::vector<float> b = RandomNormal(rng_, out), before = RandomNormal(rng_, n * out);
    std::vector<float> want(static_cast<size_t>(n * out));
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t o = 0; o < out; ++o) {
        double sum = accumulate ? before[i * out + o] : 0;
        if (bias) sum += b[o];
        for (int64_t c = 0; c < in; ++c) {
          sum += double{wide(x[i * in + c])} * double{wide(w[o * in + c])};
        }
        want[i * out + o] = static_cast<float>(sum);
      }
    }
    const DeviceInput<uint16_t> dx(x), dw(w);
    const DeviceInput<float> db(b);
    for (bool gemm : {true, false}) {
      const DeviceOutput<float> y(n * out);
      if (accumulate) {
        CARREL_ASSERT_CUDA(
            cudaMemcpy(y.data(), before.data(), before.size() * sizeof(float), cudaMemcpyDefault));
      }
      LinearCudaParams p;
      p.x = dx.data();
      p.w = dw.data();
      if (bias) p.bias = db.data();
      p.n = n;
      p.in = in;
      p.out = out;
      p.y = y.data();
      p.accumulate = accumulate;
      p.type = type;
      ASSERT_EQ(cudaSuccess, gemm ? linear_->Gemm(p, nullptr) : linear_->Run(p, nullptr));
      EXPECT_LE(RelativeError(y.Get(), want), 1e-5) << (gemm ? "gemm" : "run");
    }
  }

  DeviceWorkspace workspace_{LinearCuda::kWorkspaceBytes};
  std::unique_ptr<LinearCuda> linear_;
};

TEST_F(LinearGpuTest, RandomShapes_MatchReference) {
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t n = trial % 3 == 0 ? 1 : 1 + Below(70);
    const int64_t in = 8 * (1 + Below(60)), out = 8 * (1 + Below(60));
    ExpectMatches(n, in, out, trial % 2 == 0, trial % 5 < 2,
                  trial % 4 == 1 ? HalfType::kF16 : HalfType::kBf16);
  }
}

TEST_F(LinearGpuTest, OneTokenLongRows_MatchesReference) {
  ExpectMatches(1, 14336, 256, true, true);
  ExpectMatches(1, 4096, 1024, false, false);
  ExpectMatches(1, 4096, 1024, true, false, HalfType::kF16);
  ExpectMatches(1, 72, 8200, false, true, HalfType::kF16);
  ExpectMatches(1, 72, 8200, true, false);  // more rows: two to a warp
}

// What a token gets alone, it gets among others at any place, whatever the others are.
TEST_F(LinearGpuTest, FewTokens_HaveTheBitsOfEachAlone) {
  for (int trial = 0; trial < 24; ++trial) {
    const HalfType type = trial % 3 == 2 ? HalfType::kF16 : HalfType::kBf16;
    const int64_t n = trial % 4 == 0 ? kFewRows : 2 + Below(kFewRows - 1);
    const int64_t in = trial % 5 == 0 ? 4096 : 8 * (1 + Below(300));
    const int64_t out = trial % 6 == 0 ? 8200 : 8 * (1 + Below(60));
    SCOPED_TRACE(testing::Message() << "n " << n << " in " << in << " out " << out);
    const auto random = [&](int64_t count) {
      return type == HalfType::kF16 ? RandomF16(rng_, count) : RandomBf16(rng_, count);
    };
    const DeviceInput<uint16_t> x(random(n * in)), w(random(out * in));
    const DeviceInput<float> bias(RandomNormal(rng_, out));
    const std::vector<float> before = RandomNormal(rng_, n * out);
    const DeviceOutput<float> together(n * out), alone(n * out);
    for (const auto* y : {&together, &alone}) {
      CARREL_ASSERT_CUDA(
          cudaMemcpy(y->data(), before.data(), before.size() * sizeof(float), cudaMemcpyDefault));
    }
    LinearCudaParams p;
    p.x = x.data();
    p.w = w.data();
    p.bias = trial % 2 == 0 ? bias.data() : nullptr;
    p.n = n;
    p.in = in;
    p.out = out;
    p.y = together.data();
    p.accumulate = trial % 7 < 3;
    p.type = type;
    ASSERT_EQ(cudaSuccess, linear_->Run(p, nullptr));
    p.n = 1;
    for (int64_t i = 0; i < n; ++i) {
      p.x = x.data() + i * in;
      p.y = alone.data() + i * out;
      ASSERT_EQ(cudaSuccess, linear_->Run(p, nullptr));
    }
    EXPECT_TRUE(together.Get() == alone.Get());
  }
}

TEST_F(LinearGpuTest, OtherBiasOfSameShape_IsUsed) {
  for (int i = 0; i < 3; ++i) ExpectMatches(9, 64, 64, true, false);
}

TEST_F(LinearGpuTest, SizesThatDoNotFit_AreRefused) {
  LinearCudaParams p;
  p.n = 2;
  p.in = 12;
  p.out = 8;
  EXPECT_EQ(cudaErrorInvalidValue, linear_->Run(p, nullptr));
  p.n = 1;
  EXPECT_EQ(cudaErrorInvalidValue, linear_->Run(p, nullptr));
}

}  // namespace
}  // namespace carrel::kernels
