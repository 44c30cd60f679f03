#include "kernels/gpu_test_data.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/dot_score/dot_score_cuda.h"

namespace carrel::kernels {
namespace {

class DotScoreGpuTest : public GpuKernelTest {};

struct Shape {
  int64_t kv_heads, group, head_dim, rows, row_stride, score_stride;
};

void ExpectMatchesReference(std::mt19937_64& rng, const Shape& s, float sigma = 1.0f,
                            bool with_states = true) {
  SCOPED_TRACE("kv_heads " + std::to_string(s.kv_heads) + " group " + std::to_string(s.group) +
               " head_dim " + std::to_string(s.head_dim) + " rows " + std::to_string(s.rows));
  const int64_t d = s.head_dim;
  const std::vector<uint16_t> q = RandomBf16(rng, s.kv_heads * s.group * d, sigma);
  const std::vector<uint16_t> k = RandomBf16(rng, s.kv_heads * s.row_stride * d);
  const DeviceInput<uint16_t> device_q(q), device_k(k);
  DeviceOutput<float> scores(s.kv_heads * s.group * s.score_stride);
  const int64_t parts = DotScoreParts(s.kv_heads, s.rows);
  ASSERT_LE(parts, kMaxDotScoreParts);
  DeviceOutput<float> states(2 * s.kv_heads * s.group * parts);
  ASSERT_EQ(cudaSuccess, DotScoreCuda({.q = device_q.data(),
                                       .kv = {.k = device_k.data(), .row_stride = s.row_stride},
                                       .kv_heads = s.kv_heads,
                                       .group = s.group,
                                       .head_dim = d,
                                       .rows = s.rows,
                                       .score_stride = s.score_stride,
                                       .scale = 0.125f,
                                       .scores = scores.data(),
                                       .states = with_states ? states.data() : nullptr},
                                      nullptr));
  const std::vector<float> out = scores.Get();
  std::vector<float> all, expected;
  for (int64_t g = 0; g < s.kv_heads; ++g) {
    std::vector<const void*> rows;
    for (int64_t i = 0; i < s.rows; ++i) rows.push_back(k.data() + (g * s.row_stride + i) * d);
    const std::vector<float> wide = Widen(q.data() + g * s.group * d, s.group * d);
    std::vector<float> ref(static_cast<size_t>(s.group * s.rows));
    RefDotScoreRows(wide.data(), s.group, d, rows.data(), s.rows, 0.125f, ref.data(), s.rows);
    expected.insert(expected.end(), ref.begin(), ref.end());
    for (int64_t h = 0; h < s.group; ++h) {
      const auto at = out.begin() + (g * s.group + h) * s.score_stride;
      all.insert(all.end(), at, at + s.rows);
      for (int64_t i = s.rows; i < s.score_stride; ++i) {
        ASSERT_TRUE(std::isnan(at[i])) << "written beyond the rows";
      }
    }
  }
  // bf16 products are exact; sums of head_dim of them in fp32.
  EXPECT_LE(RelativeError(all, expected), 1e-6);
  const std::vector<float> of_parts = states.Get();
  for (int64_t h = 0; h < s.kv_heads * s.group && s.rows > 0; ++h) {
    const float* first = of_parts.data() + 2 * h * parts;
    if (!with_states) {
      ASSERT_TRUE(std::isnan(first[0])) << "written, but not wanted";
      continue;
    }
    const float* of_head = out.data() + h * s.score_stride;
    const float most = *std::max_element(of_head, of_head + s.rows);
    double sum = 0, expected_sum = 0;
    for (int64_t i = 0; i < parts; ++i) {
      ASSERT_LE(first[2 * i], most);
      if (first[2 * i + 1] > 0) sum += first[2 * i + 1] * std::exp(double{first[2 * i]} - most);
    }
    for (int64_t i = 0; i < s.rows; ++i) expected_sum += std::exp(double{of_head[i]} - most);
    ASSERT_NEAR(sum, expected_sum, 1e-5 * expected_sum) << "head " << h;
  }
}

TEST_F(DotScoreGpuTest, RandomShapes_MatchReference) {
  for (int64_t trial = 0; trial < 48; ++trial) {
    const int64_t rows = Below(trial % 6 == 0 ? 4000 : 90);
    ExpectMatchesReference(rng_,
                           {.kv_heads = 1 + Below(4),
                            .group = 1 + Below(16),
                            .head_dim = trial % 2 == 0 ? 64 : 128,
                            .rows = rows,
                            .row_stride = rows + 1 + Below(9),
                            .score_stride = rows + 1 + Below(9)},
                           trial % 4 == 0 ? 100.0f : 1.0f, trial % 5 != 0);
  }
}

TEST_F(DotScoreGpuTest, Largest_500kRows_MatchReference) {
  ExpectMatchesReference(rng_, {1, 4, 128, 500'001, 500'001, 500'003});
}

TEST_F(DotScoreGpuTest, UnservedShapes_AreRefused) {
  DotScoreCudaParams params{.kv = {.row_stride = 2},
                            .kv_heads = 1,
                            .group = 4,
                            .head_dim = 64,
                            .rows = 3,
                            .score_stride = 4};
  EXPECT_EQ(DotScoreCuda(params, nullptr), cudaErrorInvalidValue);
  params.kv.row_stride = 3;
  params.head_dim = 72;
  EXPECT_EQ(DotScoreCuda(params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace carrel::kernels
