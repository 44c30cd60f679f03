#include <algorithm>
#include <cmath>
#include <memory>
#include <set>

#include "kernels/gpu_test_data.h"
#include "kernels/select/rescore_rows/rescore_rows.h"

namespace carrel::kernels {
namespace {

class RescoreRowsGpuTest : public GpuKernelTest {
 protected:
  struct Shape {
    int64_t kv_heads, group, head_dim, rows, count, wanted;
    bool pinned = false;
    bool attended = false;
  };
  void ExpectMatchesReference(const Shape& s, float sigma = 1.0f);
};

// What differs between fp32 and fp64, and the step in which scores are compared.
constexpr double kNear = 1.0 / 64 + 2e-4;

// Attention over the chosen rows, in double precision: out and lse of the reference's Math.
void ExpectAttends(const RescoreRowsParams& p, const std::vector<int32_t>& ids,
                   const std::vector<float>& out, const std::vector<float>& lse) {
  const int64_t chosen = std::min(p.wanted, p.count);
  for (int64_t h = 0; h < p.kv_heads * p.group; ++h) {
    const int64_t head = h / p.group;
    std::vector<double> scores, sum(static_cast<size_t>(p.head_dim));
    for (int64_t i = 0; i < chosen; ++i) {
      const int64_t row = head * p.kv.row_stride + ids[static_cast<size_t>(head * p.wanted + i)];
      double dot = 0;
      for (int64_t c = 0; c < p.head_dim; ++c) {
        dot += double{Bf16ToFloat(p.q[h * p.head_dim + c])} *
               Bf16ToFloat(p.kv.k[row * p.head_dim + c]);
      }
      scores.push_back(dot * p.scale);
    }
    const double most = *std::max_element(scores.begin(), scores.end());
    double total = 0, squares = 0, error = 0;
    for (int64_t i = 0; i < chosen; ++i) {
      const int64_t row = head * p.kv.row_stride + ids[static_cast<size_t>(head * p.wanted + i)];
      const double weight = std::exp(scores[static_cast<size_t>(i)] - most);
      total += weight;
      for (int64_t c = 0; c < p.head_dim; ++c) {
        sum[static_cast<size_t>(c)] += weight * Bf16ToFloat(p.kv.v[row * p.head_dim + c]);
      }
    }
    for (int64_t c = 0; c < p.head_dim; ++c) {
      const double x = sum[static_cast<size_t>(c)] / total;
      squares += x * x;
      error += std::pow(out[static_cast<size_t>(h * p.head_dim + c)] - x, 2);
    }
    ASSERT_LT(std::sqrt(error / squares), 8e-3) << "q head " << h;  // weights are rounded to bf16
    ASSERT_NEAR(lse[static_cast<size_t>(h)], most + std::log(total), 1e-4) << "q head " << h;
  }
}

// Group score of each candidate, as the reference's Math says, to judge rows that differ.
std::vector<double> GroupScores(const RescoreRowsParams& p, int64_t head) {
  std::vector<double> best(static_cast<size_t>(p.count), -INFINITY);
  for (int64_t h = head * p.group; h < (head + 1) * p.group; ++h) {
    std::vector<double> scores;
    double sum = 0;
    for (int64_t i = 0; i < p.count; ++i) {
      const int64_t row = head * p.kv.row_stride + p.candidates[head * p.candidate_stride + i];
      double dot = 0;
      for (int64_t c = 0; c < p.head_dim; ++c) {
        dot += double{Bf16ToFloat(p.q[h * p.head_dim + c])} *
               Bf16ToFloat(p.kv.k[row * p.head_dim + c]);
      }
      scores.push_back(dot * p.scale);
      sum += std::exp(scores.back());
    }
    for (size_t i = 0; i < best.size(); ++i) best[i] = std::max(best[i], scores[i] - std::log(sum));
  }
  return best;
}

// Rows that differ from the reference's lie at the boundary: within the step in which scores are
// compared, and fp32. p: on the host.
void ExpectChoice(const RescoreRowsParams& p, const std::vector<int32_t>& out,
                  const std::vector<int32_t>& expected) {
  for (int64_t head = 0; head < p.kv_heads; ++head) {
    const auto first = head * p.wanted, chosen = std::min(p.wanted, p.count);
    for (int64_t i = chosen; i < p.wanted; ++i) {
      ASSERT_EQ(out[static_cast<size_t>(first + i)], -1) << "written beyond the candidates";
    }
    const std::set<int32_t> found(out.begin() + first, out.begin() + first + chosen);
    const std::set<int32_t> wanted(expected.begin() + first, expected.begin() + first + chosen);
    ASSERT_EQ(static_cast<int64_t>(found.size()), chosen) << "a row twice";
    if (found == wanted) continue;
    const std::vector<double> scores = GroupScores(p, head);
    double least = INFINITY, most_left = -INFINITY;
    for (int64_t i = 0; i < p.count; ++i) {
      const int32_t row = p.candidates[head * p.candidate_stride + i];
      (found.count(row) != 0 ? least : most_left) =
          found.count(row) != 0 ? std::min(least, scores[static_cast<size_t>(i)])
                                : std::max(most_left, scores[static_cast<size_t>(i)]);
    }
    ASSERT_TRUE(std::includes(wanted.begin(), wanted.end(), found.begin(), found.end()) ||
                most_left - std::max(least, -32.0) < kNear)
        << "head " << head << ": " << most_left << " was left for " << least;
  }
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
  const auto v = RandomBf16(rng_, s.attended ? s.kv_heads * s.rows * s.head_dim : 0);
  const DeviceInput<uint16_t> device_v(v);
  DeviceOutput<float> attended(s.kv_heads * s.group * s.head_dim), lse(s.kv_heads * s.group);
  RescoreRowsParams p{.q = device_q.data(),
                      .kv = {s.pinned ? pinned : device_k.data(), device_v.data(), s.rows},
                      .candidates = device_candidates.data(),
                      .kv_heads = s.kv_heads,
                      .group = s.group,
                      .head_dim = s.head_dim,
                      .candidate_stride = candidate_stride,
                      .count = s.count,
                      .wanted = s.wanted,
                      .scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim)),
                      .ids = ids.data(),
                      .out = s.attended ? attended.data() : nullptr,
                      .lse = lse.data()};
  CARREL_ASSERT_CUDA(RescoreRows(p, nullptr));
  const std::vector<int32_t> out = ids.Get();
  CARREL_EXPECT_CUDA(cudaFreeHost(pinned));
  std::vector<int32_t> expected(out.size(), -1);
  p.q = q.data();
  p.kv = {k.data(), v.data(), s.rows};
  p.candidates = candidates.data();
  p.ids = expected.data();
  RefRescoreRows(p);
  if (s.attended) {
    ASSERT_NO_FATAL_FAILURE(ExpectAttends(p, out, attended.Get(), lse.Get()));
  }
  ExpectChoice(p, out, expected);
}

TEST_F(RescoreRowsGpuTest, RandomShapes_MatchReference) {
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t rows = 1 + Below(trial % 4 == 0 ? 6000 : 400), count = 1 + Below(rows);
    ExpectMatchesReference({.kv_heads = 1 + Below(4),
                            .group = 1 + Below(16),
                            .head_dim = trial % 2 == 0 ? 64 : 128,
                            .rows = rows,
                            .count = count,
                            .wanted = 1 + Below(trial % 5 == 0 ? count + 9 : (count + 3) / 4),
                            .attended = trial % 2 == 0 || trial % 3 == 0},
                           trial % 3 == 0 ? 4.0f : 1.0f);
    if (HasFatalFailure()) return;
  }
}

TEST_F(RescoreRowsGpuTest, LargeShapes_MatchReference) {
  ExpectMatchesReference({8, 4, 128, 12'000, 8192, 2048});
  ExpectMatchesReference({.kv_heads = 8,
                          .group = 4,
                          .head_dim = 128,
                          .rows = 12'000,
                          .count = 4096,
                          .wanted = 2048,
                          .attended = true});
  ExpectMatchesReference({.kv_heads = 2,
                          .group = 16,
                          .head_dim = 128,
                          .rows = 9000,
                          .count = 9000,
                          .wanted = 5000,
                          .attended = true});
  ExpectMatchesReference({1, 16, 64, 20'000, 16'384, 4096});
  ExpectMatchesReference({40, 2, 64, 3000, 2500, 700});  // more clusters than fit at once
}

TEST_F(RescoreRowsGpuTest, SequencesTogether_EachHasTheBitsItHasAlone) {
  struct One {
    std::unique_ptr<DeviceInput<uint16_t>> q, k, v;
    std::unique_ptr<DeviceInput<int32_t>> candidates;
    std::unique_ptr<DeviceOutput<int32_t>> ids;
    std::unique_ptr<DeviceOutput<float>> out, lse;
    std::vector<int32_t> ids_alone;
    std::vector<float> out_alone, lse_alone;
  };
  std::vector<One> ones(36);
  std::vector<RescoreRowsParams> all;
  for (One& one : ones) {
    const int64_t rows = 1 + Below(Below(5) == 0 ? 9000 : 1200), wanted = 1 + Below(rows);
    std::vector<int32_t> candidates;
    for (int64_t i = 0; i < 2 * rows; ++i) candidates.push_back(static_cast<int32_t>(i % rows));
    one.q = std::make_unique<DeviceInput<uint16_t>>(RandomBf16(rng_, 2 * 4 * 128));
    one.k = std::make_unique<DeviceInput<uint16_t>>(RandomBf16(rng_, 2 * rows * 128));
    one.v = std::make_unique<DeviceInput<uint16_t>>(RandomBf16(rng_, 2 * rows * 128));
    one.candidates = std::make_unique<DeviceInput<int32_t>>(candidates);
    one.ids = std::make_unique<DeviceOutput<int32_t>>(2 * wanted);
    one.out = std::make_unique<DeviceOutput<float>>(2 * 4 * 128);
    one.lse = std::make_unique<DeviceOutput<float>>(2 * 4);
    all.push_back({.q = one.q->data(),
                   .kv = {one.k->data(), one.v->data(), rows},
                   .candidates = one.candidates->data(),
                   .kv_heads = 2,
                   .group = 4,
                   .head_dim = 128,
                   .candidate_stride = rows,
                   .count = rows,
                   .wanted = wanted,
                   .scale = 0.1f,
                   .ids = one.ids->data(),
                   .out = Below(3) == 0 ? nullptr : one.out->data(),
                   .lse = one.lse->data()});
    CARREL_ASSERT_CUDA(RescoreRows(all.back(), nullptr));
    one.ids_alone = one.ids->Get();
    one.out_alone = one.out->Get();
    one.lse_alone = one.lse->Get();
    one.ids->Poison();
    one.out->Poison();
    one.lse->Poison();
  }
  CARREL_ASSERT_CUDA(RescoreRows(all, nullptr));
  for (const One& one : ones) {
    EXPECT_EQ(one.ids->Get(), one.ids_alone);
    EXPECT_TRUE(SameBits(one.out->Get(), one.out_alone));
    EXPECT_TRUE(SameBits(one.lse->Get(), one.lse_alone));
  }
}

TEST_F(RescoreRowsGpuTest, KeysInPinnedMemory_MatchReference) {
  ExpectMatchesReference({2, 3, 64, 3000, 1024, 256, true});
}

// Each head's choice and attention are, bit for bit, those of a call in which all heads want as
// many.
TEST_F(RescoreRowsGpuTest, HeadsOfDifferentWants_ChooseAndAttendAsAlone) {
  const int64_t kv_heads = 3, group = 3, d = 64, rows = 5000, count = 3000;
  const DeviceInput<uint16_t> q(RandomBf16(rng_, kv_heads * group * d)),
      k(RandomBf16(rng_, kv_heads * rows * d)), v(RandomBf16(rng_, kv_heads * rows * d));
  std::vector<int32_t> candidates;
  for (int64_t i = 0; i < kv_heads * count; ++i) {
    candidates.push_back(static_cast<int32_t>(i % count + i / count * 7));
  }
  const DeviceInput<int32_t> device_candidates(candidates);
  const std::vector<int32_t> wanted = {static_cast<int32_t>(1 + Below(900)), 1,
                                       static_cast<int32_t>(901 + Below(900))};
  const DeviceInput<int32_t> device_wanted(wanted);
  struct Result {
    std::vector<int32_t> ids;
    std::vector<float> out, lse;
  };
  const auto choose = [&](int64_t most, const int32_t* of_head) {
    DeviceOutput<int32_t> ids(kv_heads * most);
    DeviceOutput<float> out(kv_heads * group * d), lse(kv_heads * group);
    CARREL_EXPECT_CUDA(RescoreRows({.q = q.data(),
                                    .kv = {k.data(), v.data(), rows},
                                    .candidates = device_candidates.data(),
                                    .kv_heads = kv_heads,
                                    .group = group,
                                    .head_dim = d,
                                    .candidate_stride = count,
                                    .count = count,
                                    .wanted = most,
                                    .wanted_of_head = of_head,
                                    .scale = 0.125f,
                                    .ids = ids.data(),
                                    .out = out.data(),
                                    .lse = lse.data()},
                                   nullptr));
    return Result{ids.Get(), out.Get(), lse.Get()};
  };
  const Result found = choose(wanted[2], device_wanted.data());
  for (int64_t g = 0; g < kv_heads; ++g) {
    const int64_t own = wanted[static_cast<size_t>(g)];
    const Result alone = choose(own, nullptr);
    for (int64_t i = 0; i < wanted[2]; ++i) {
      ASSERT_EQ(found.ids[static_cast<size_t>(g * wanted[2] + i)],
                i < own ? alone.ids[static_cast<size_t>(g * own + i)] : -1)
          << "head " << g << " place " << i;
    }
    for (int64_t i = g * group * d; i < (g + 1) * group * d; ++i) {
      ASSERT_EQ(found.out[static_cast<size_t>(i)], alone.out[static_cast<size_t>(i)]);
    }
    for (int64_t h = g * group; h < (g + 1) * group; ++h) {
      ASSERT_EQ(found.lse[static_cast<size_t>(h)], alone.lse[static_cast<size_t>(h)]);
    }
  }
}

TEST_F(RescoreRowsGpuTest, AllAlike_TakesTheFirst) {
  const std::vector<uint16_t> ones(64 * 3000, FloatToBf16(1.0f));
  std::vector<int32_t> candidates(3000);
  for (size_t i = 0; i < candidates.size(); ++i) candidates[i] = static_cast<int32_t>(2999 - i);
  const DeviceInput<uint16_t> q(std::vector<uint16_t>(ones.begin(), ones.begin() + 64)), k(ones);
  const DeviceInput<int32_t> device_candidates(candidates);
  DeviceOutput<int32_t> ids(700);
  CARREL_ASSERT_CUDA(RescoreRows({.q = q.data(),
                                  .kv = {.k = k.data(), .row_stride = 3000},
                                  .candidates = device_candidates.data(),
                                  .kv_heads = 1,
                                  .group = 1,
                                  .head_dim = 64,
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
