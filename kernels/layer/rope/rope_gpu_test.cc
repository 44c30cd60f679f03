#include "kernels/gpu_test_data.h"
#include "kernels/layer/rms_norm/rms_norm.h"
#include "kernels/layer/rope/rope.h"
#include "kernels/layer/rope/rope_cuda.h"

namespace carrel::kernels {
namespace {

struct Case {
  int64_t n;
  int32_t q_heads, kv_heads, head_dim;
  int64_t position, row;
  int32_t step;
  bool bias, norm, drift = false;
  float scale = 1;
  bool left_out = false;
};

class RopeGpuTest : public GpuKernelTest {
 protected:
  // What the kernel's contract composes, from the references of its parts.
  std::vector<float> Want(const Case& c, std::vector<float> x, const std::vector<float>& bias,
                          const std::vector<float>& norm, int64_t first_head, int64_t heads,
                          int64_t all_heads, bool rotate, const std::vector<float>& inv_freq,
                          const std::vector<float>& drift = {}) {
    const int64_t d = c.head_dim;
    std::vector<float> part;
    for (int64_t i = 0; i < c.n; ++i) {
      for (int64_t e = first_head * d; e < (first_head + heads) * d; ++e) {
        part.push_back(x[i * all_heads * d + e] + (c.bias ? bias[e] : 0.0f));
      }
    }
    if (c.norm && rotate) {
      RefRmsNorm(part.data(), c.n * heads, d, d, norm.data(), 1e-6f, part.data(), d);
    }
    for (float& e : part) e *= rotate ? c.scale : 1.0f;
    for (size_t e = 0; !drift.empty() && e < part.size(); ++e) part[e] += drift[e % drift.size()];
    if (rotate && !c.left_out)
      RefRope(part.data(), c.n, heads, d, c.position + c.step, inv_freq.data());
    return part;
  }

  void Run(const Case& c) {
    SCOPED_TRACE(testing::Message()
                 << "n " << c.n << " heads " << c.q_heads << "/" << c.kv_heads << " head_dim "
                 << c.head_dim << " position " << c.position << " step " << c.step);
    const int64_t d = c.head_dim, heads = c.q_heads + 2 * c.kv_heads;
    const std::vector<float> x = RandomNormal(rng_, c.n * heads * d);
    const std::vector<float> bias = RandomNormal(rng_, heads * d);
    const std::vector<float> q_norm = RandomNormal(rng_, d), k_norm = RandomNormal(rng_, d);
    std::vector<float> drift;
    if (c.drift) drift = RandomNormal(rng_, c.q_heads * d);
    std::vector<float> inv_freq;
    for (int64_t i = 0; i < d / 2; ++i) {
      inv_freq.push_back(
          std::pow(500000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(d)));
    }
    const int64_t rows = c.row + c.step + c.n + 2, stride = rows * d;
    const DeviceInput<float> dx(x), dbias(bias), dq_norm(q_norm), dk_norm(k_norm), dfreq(inv_freq),
        ddrift(drift);
    const DeviceInput<int32_t> dstep({c.step});
    const DeviceOutput<uint16_t> q(c.n * c.q_heads * d), k(c.kv_heads * stride),
        v(c.kv_heads * stride);
    const DeviceOutput<float> exact(c.n * c.q_heads * d);
    RopeCudaParams p;
    p.qkv = dx.data();
    if (c.bias) p.bias = dbias.data();
    if (c.norm) p.q_norm = dq_norm.data();
    if (c.norm) p.k_norm = dk_norm.data();
    p.eps = 1e-6f;
    p.scale = c.scale;
    if (c.drift) p.drift = ddrift.data();
    if (!c.left_out) p.inv_freq = dfreq.data();
    p.n = c.n;
    p.q_heads = c.q_heads;
    p.kv_heads = c.kv_heads;
    p.head_dim = c.head_dim;
    p.first_position = c.position;
    p.first_row = c.row;
    p.step = dstep.data();
    p.q = q.data();
    p.q_exact = exact.data();
    p.kv = {k.data(), v.data(), rows};
    ASSERT_EQ(cudaSuccess, RopeCuda(p, nullptr));

    const auto want_q = Want(c, x, bias, q_norm, 0, c.q_heads, heads, true, inv_freq, drift);
    const auto want_k = Want(c, x, bias, k_norm, c.q_heads, c.kv_heads, heads, true, inv_freq);
    const auto want_v =
        Want(c, x, bias, k_norm, c.q_heads + c.kv_heads, c.kv_heads, heads, false, inv_freq);
    EXPECT_LE(RelativeError(exact.Get(), want_q), 1e-5);
    EXPECT_LE(RelativeError(Widen(q.Get()), want_q), kBf16Tolerance);
    for (const auto& [got, want] : {std::pair{k.Get(), want_k}, std::pair{v.Get(), want_v}}) {
      std::vector<float> placed;
      for (int64_t i = 0; i < c.n; ++i) {
        for (int64_t g = 0; g < c.kv_heads; ++g) {
          for (int64_t e = 0; e < d; ++e) {
            placed.push_back(Bf16ToFloat(got[g * stride + (c.row + c.step + i) * d + e]));
          }
        }
      }
      EXPECT_LE(RelativeError(placed, want), kBf16Tolerance);
      int64_t untouched = 0;
      for (uint16_t bits : got) untouched += bits == 0xffff;
      EXPECT_EQ(untouched, c.kv_heads * (rows - c.n) * d) << "rows that are not the tokens'";
    }
  }
};

TEST_F(RopeGpuTest, RandomShapes_MatchComposedReferences) {
  const int32_t dims[] = {64, 128, 32, 16, 96, 256};
  for (int trial = 0; trial < 36; ++trial) {
    const auto kv_heads = static_cast<int32_t>(1 + Below(3));
    Run({.n = 1 + Below(20),
         .q_heads = static_cast<int32_t>(kv_heads * (1 + Below(4))),
         .kv_heads = kv_heads,
         .head_dim = dims[trial % 6],
         .position = Below(trial % 4 == 0 ? 1'000'000 : 1000),
         .row = Below(10),
         .step = static_cast<int32_t>(Below(50)),
         .bias = trial % 2 == 0,
         .norm = trial % 3 == 0,
         .drift = trial % 4 < 2,
         .scale = trial % 5 == 0 ? 1.25f : 1.0f,
         .left_out = trial % 7 == 6});
  }
}

// Each in a place of its own: the bits of each alone, and nothing else is touched.
TEST_F(RopeGpuTest, TokensOfSeveralSequences_HaveTheBitsOfEachAlone) {
  const int64_t d = 128, n = 2 + Below(20), q_heads = 4, kv_heads = 2, layer = Below(3), rows = 7;
  const int64_t width = (q_heads + 2 * kv_heads) * d, layer_rows = 2 * kv_heads * rows;
  const auto places_of = [&](uint16_t* k) { return KvRows{k, k + layer_rows / 2 * d, rows}; };
  const DeviceInput<float> x(RandomNormal(rng_, n * width)), freq(RandomNormal(rng_, d / 2)),
      norm(RandomNormal(rng_, d));
  const DeviceOutput<uint16_t> together(n * 3 * layer_rows * d), alone(n * 3 * layer_rows * d),
      q(n * q_heads * d), q_alone(n * q_heads * d);
  const DeviceOutput<float> exact(n * q_heads * d), exact_alone(n * q_heads * d);
  RopeCudaParams p;
  p.q_norm = p.k_norm = norm.data();
  p.inv_freq = freq.data();
  p.q_heads = q_heads;
  p.kv_heads = kv_heads;
  p.head_dim = d;
  std::vector<RopeCudaRow> places;
  for (int64_t i = 0; i < n; ++i) {
    const RopeCudaRow at{Below(1'000'000), Below(rows),
                         places_of(together.data() + i * 3 * layer_rows * d), layer_rows};
    places.push_back(at);
    p.qkv = x.data() + i * width;
    p.n = 1;
    p.first_position = at.position;
    p.first_row = at.row;
    p.q = q_alone.data() + i * q_heads * d;
    p.q_exact = exact_alone.data() + i * q_heads * d;
    p.kv = places_of(alone.data() + (i * 3 + layer) * layer_rows * d);
    ASSERT_EQ(cudaSuccess, RopeCuda(p, nullptr));
  }
  const DeviceInput<RopeCudaRow> device_places(places);
  p.qkv = x.data();
  p.n = n;
  p.q = q.data();
  p.q_exact = exact.data();
  p.rows = device_places.data();
  p.layer = static_cast<int32_t>(layer);
  EXPECT_EQ(cudaErrorInvalidValue, RopeCuda(p, nullptr)) << "two places";
  p.kv = {};
  ASSERT_EQ(cudaSuccess, RopeCuda(p, nullptr));
  EXPECT_TRUE(q.Get() == q_alone.Get());
  EXPECT_TRUE(exact.Get() == exact_alone.Get());
  EXPECT_TRUE(together.Get() == alone.Get());
}

TEST_F(RopeGpuTest, ExactRows_TakeTheirTokensBits) {
  const int64_t d = 64, n = 1 + Below(50), kept = Below(n + 1), q_heads = 4, kv_heads = 2;
  const std::vector<float> x = RandomNormal(rng_, n * (q_heads + 2 * kv_heads) * d);
  const std::vector<float> inv_freq(d / 2, 0.01f);
  std::vector<int32_t> rows(static_cast<size_t>(n), -1);
  for (int64_t i = 0; i < kept; ++i) rows[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  std::shuffle(rows.begin(), rows.end(), rng_);
  const DeviceInput<float> dx(x), dfreq(inv_freq);
  const DeviceInput<int32_t> drows(rows);
  const DeviceOutput<float> all(n * q_heads * d), some(kept * q_heads * d);
  const DeviceOutput<uint16_t> q(n * q_heads * d), q_again(n * q_heads * d), k(kv_heads * n * d),
      v(kv_heads * n * d);
  RopeCudaParams p;
  p.qkv = dx.data();
  p.inv_freq = dfreq.data();
  p.n = n;
  p.q_heads = q_heads;
  p.kv_heads = kv_heads;
  p.head_dim = d;
  p.first_position = Below(1000);
  p.q = q.data();
  p.q_exact = all.data();
  p.kv = {k.data(), v.data(), n};
  CARREL_ASSERT_CUDA(RopeCuda(p, nullptr));
  p.q = q_again.data();
  p.q_exact = some.data();
  p.q_exact_rows = drows.data();
  CARREL_ASSERT_CUDA(RopeCuda(p, nullptr));
  EXPECT_TRUE(SameBits(q.Get(), q_again.Get()));
  const std::vector<float> every = all.Get();
  std::vector<float> want(static_cast<size_t>(kept * q_heads * d));
  for (int64_t i = 0; i < n; ++i) {
    if (rows[static_cast<size_t>(i)] < 0) continue;
    std::copy_n(every.begin() + i * q_heads * d, q_heads * d,
                want.begin() + rows[static_cast<size_t>(i)] * q_heads * d);
  }
  EXPECT_TRUE(SameBits(some.Get(), want));
}

TEST_F(RopeGpuTest, QueriesAlone_MatchReference) {
  const int64_t d = 64, n = 7;
  std::vector<float> x = RandomNormal(rng_, n * 4 * d);
  std::vector<float> inv_freq(d / 2, 0.01f);
  const DeviceInput<float> dx(x), dfreq(inv_freq);
  const DeviceOutput<float> exact(n * 4 * d);
  const DeviceOutput<uint16_t> q(n * 4 * d);
  RopeCudaParams p;
  p.qkv = dx.data();
  p.inv_freq = dfreq.data();
  p.n = n;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.head_dim = d;
  p.first_position = 77;
  p.q = q.data();
  p.q_exact = exact.data();
  ASSERT_EQ(cudaSuccess, RopeCuda(p, nullptr));
  RefRope(x.data(), n, 4, d, 77, inv_freq.data());
  EXPECT_LE(RelativeError(exact.Get(), x), 1e-5);
}

}  // namespace
}  // namespace carrel::kernels
