#include <algorithm>
#include <cmath>
#include <set>

#include "kernels/gpu_test_data.h"
#include "kernels/rescore_rows/rescore_rows.h"

namespace carrel::kernels {
namespace {

class RescoreRowsGpuTest : public GpuKernelTest {
 protected:
  struct Shape {
    int64_t kv_heads, group, head_dim, rows, count, wanted;
    bool pinned = false;
  };
  void ExpectMatchesReference(const Shape& s, float sigma = 1.0f);
};

// Group score of each candidate, as the reference's Math says, to judge rows that differ.
std::vector<double> GroupScores(const RescoreRowsParams& p, int64_t head) {
  std::vector<double> best(static_cast<size_t>(p.count), -INFINITY);
  for (int64_t h = head * p.group; h < (head + 1) * p.group; ++h) {
    std::vector<double> scores;
    double sum = 0;
    for (int64_t i = 0; i < p.count; ++i) {
      const int64_t row = head * p.row_stride + p.candidates[head * p.candidate_stride + i];
      double dot = 0;
      for (int64_t c = 0; c < p.head_dim; ++c) {
        dot +=
            double{Bf16ToFloat(p.q[h * p.head_dim + c])} * Bf16ToFloat(p.k[row * p.head_dim + c]);
      }
      scores.push_back(dot * p.scale);
      sum += std::exp(scores.back());
    }
    for (size_t i = 0; i < best.size(); ++i) best[i] = std::max(best[i], scores[i] - std::log(sum));
  }
  return best;
}

void RescoreRowsGpuTest::ExpectMatchesReference(const Shape& s, float sigma) {
  SCOPED_TRACE("kv_heads " + std::to_string(s.kv_heads) + " group " + std::to_string(s.group) +
               " head_dim " + std::to_string(s.head_dim) + " rows " + std::to_string(s.rows) +
               " count " + std::to_string(s.count) + " wanted " + std::to_string(s.wanted));
  const int64_t candidate_stride = s.count + Below(4);
  const auto q = RandomBf16(rng_, s.kv_heads * s.group * s.head_dim, sigma);
  const auto k = RandomBf16(rng_, s.kv_heads * s.rows * s.head_dim);
  std::vector<int32_t> candidates(static_cast<size_t>(s.kv_heads * candidate_stride), -1);
  for (int64_t head = 0; head < s.kv_heads; ++head) {
    std::vector<int32_t> all(static_cast<size_t>(s.rows));
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
    std::shuffle(all.begin(), all.end(), rng_);
    std::copy_n(all.begin(), s.count, candidates.begin() + head * candidate_stride);
  }
  const DeviceInput<uint16_t> device_q(q), device_k(k);
  const DeviceInput<int32_t> device_candidates(candidates);
  uint16_t* pinned = nullptr;
  if (s.pinned) {
    CARREL_ASSERT_CUDA(cudaMallocHost(reinterpret_cast<void**>(&pinned), k.size() * 2));
    std::copy(k.begin(), k.end(), pinned);
  }
  DeviceOutput<int32_t> ids(s.kv_heads * s.wanted);
  RescoreRowsParams p{.q = device_q.data(),
                      .k = s.pinned ? pinned : device_k.data(),
                      .candidates = device_candidates.data(),
                      .kv_heads = s.kv_heads,
                      .group = s.group,
                      .head_dim = s.head_dim,
                      .row_stride = s.rows,
                      .candidate_stride = candidate_stride,
                      .count = s.count,
                      .wanted = s.wanted,
                      .scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim)),
                      .ids = ids.data()};
  CARREL_ASSERT_CUDA(RescoreRows(p, nullptr));
  const std::vector<int32_t> out = ids.Get();
  CARREL_EXPECT_CUDA(cudaFreeHost(pinned));
  std::vector<int32_t> expected(out.size(), -1);
  p.q = q.data();
  p.k = k.data();
  p.candidates = candidates.data();
  p.ids = expected.data();
  RefRescoreRows(p);
  for (int64_t head = 0; head < s.kv_heads; ++head) {
    const auto first = head * s.wanted, chosen = std::min(s.wanted, s.count);
    for (int64_t i = chosen; i < s.wanted; ++i) {
      ASSERT_EQ(out[static_cast<size_t>(first + i)], -1) << "written beyond the candidates";
    }
    const std::set<int32_t> found(out.begin() + first, out.begin() + first + chosen);
    const std::set<int32_t> wanted(expected.begin() + first, expected.begin() + first + chosen);
    ASSERT_EQ(static_cast<int64_t>(found.size()), chosen) << "a row twice";
    if (found == wanted) continue;
    // Rows that differ lie at the boundary: within the step in which scores are compared, and fp32.
    const std::vector<double> scores = GroupScores(p, head);
    double least = INFINITY, most_left = -INFINITY;
    for (int64_t i = 0; i < s.count; ++i) {
      const int32_t row = candidates[static_cast<size_t>(head * candidate_stride + i)];
      (found.count(row) != 0 ? least : most_left) =
          found.count(row) != 0 ? std::min(least, scores[static_cast<size_t>(i)])
                                : std::max(most_left, scores[static_cast<size_t>(i)]);
    }
    ASSERT_TRUE(std::includes(wanted.begin(), wanted.end(), found.begin(), found.end()) ||
                most_left - std::max(least, -64.0) < 2e-4)
        << "head " << head << ": " << most_left << " was left for " << least;
  }
}

TEST_F(RescoreRowsGpuTest, RandomShapes_MatchReference) {
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t rows = 1 + Below(trial % 4 == 0 ? 6000 : 400), count = 1 + Below(rows);
    ExpectMatchesReference({.kv_heads = 1 + Below(4),
                            .group = 1 + Below(16),
                            .head_dim = trial % 2 == 0 ? 64 : 128,
                            .rows = rows,
                            .count = count,
                            .wanted = 1 + Below(trial % 5 == 0 ? count + 9 : (count + 3) / 4)},
                           trial % 3 == 0 ? 4.0f : 1.0f);
    if (HasFatalFailure()) return;
  }
}

TEST_F(RescoreRowsGpuTest, LargeShapes_MatchReference) {
  ExpectMatchesReference({8, 4, 128, 12'000, 8192, 2048});
  ExpectMatchesReference({1, 16, 64, 20'000, 16'384, 4096});
  ExpectMatchesReference({40, 2, 64, 3000, 2500, 700});  // more clusters than fit at once
}

TEST_F(RescoreRowsGpuTest, KeysInPinnedMemory_MatchReference) {
  ExpectMatchesReference({2, 3, 64, 3000, 1024, 256, true});
}

TEST_F(RescoreRowsGpuTest, AllAlike_TakesTheFirst) {
  const std::vector<uint16_t> ones(64 * 3000, FloatToBf16(1.0f));
  std::vector<int32_t> candidates(3000);
  for (size_t i = 0; i < candidates.size(); ++i) candidates[i] = static_cast<int32_t>(2999 - i);
  const DeviceInput<uint16_t> q(std::vector<uint16_t>(ones.begin(), ones.begin() + 64)), k(ones);
  const DeviceInput<int32_t> device_candidates(candidates);
  DeviceOutput<int32_t> ids(700);
  CARREL_ASSERT_CUDA(RescoreRows({.q = q.data(),
                                  .k = k.data(),
                                  .candidates = device_candidates.data(),
                                  .kv_heads = 1,
                                  .group = 1,
                                  .head_dim = 64,
                                  .row_stride = 3000,
                                  .candidate_stride = 3000,
                                  .count = 3000,
                                  .wanted = 700,
                                  .scale = 0.125f,
                                  .ids = ids.data()},
                                 nullptr));
  EXPECT_EQ(ids.Get(), std::vector<int32_t>(candidates.begin(), candidates.begin() + 700));
}

TEST_F(RescoreRowsGpuTest, UnservedShapes_AreRefused) {
  const RescoreRowsParams good{
      .kv_heads = 1, .group = 4, .head_dim = 64, .candidate_stride = 8, .scale = 1};
  CARREL_EXPECT_CUDA(RescoreRows(good, nullptr));  // nothing to do
  const auto refused = [&](auto change) {
    RescoreRowsParams params = good;
    change(params);
    EXPECT_EQ(RescoreRows(params, nullptr), cudaErrorInvalidValue);
  };
  refused([](auto& p) { p.head_dim = 96; });
  refused([](auto& p) { p.group = 17; });
  refused([](auto& p) { p.count = 9; });
  refused([](auto& p) { p.wanted = -1; });
  refused([](auto& p) { p.scale = 0; });
  refused([](auto& p) { p.count = p.candidate_stride = MostRescoredRows(p.group) + 1; });
}

}  // namespace
}  // namespace carrel::kernels
