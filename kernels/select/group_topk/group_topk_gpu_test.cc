#include "kernels/gpu_test_data.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/group_topk/group_topk.h"

namespace carrel::kernels {
namespace {

class GroupTopKGpuTest : public GpuKernelTest {
 protected:
  struct Shape {
    int64_t kv_heads, group, n, k;
    float sigma = 3;
  };

  // States of parts of any size; -inf and 0 of one without rows.
  std::vector<float> StatesOf(const std::vector<float>& scores, int64_t stride, int64_t heads,
                              int64_t n, int64_t parts) {
    std::vector<float> states;
    for (int64_t h = 0; h < heads; ++h) {
      int64_t at = 0;
      for (int64_t p = 0; p < parts; ++p) {
        const int64_t end = p == parts - 1 ? n : std::min(n, at + Below(2 * n / parts + 2));
        const auto first = scores.begin() + h * stride;
        float max = -INFINITY;
        for (int64_t j = at; j < end; ++j) max = std::max(max, first[j]);
        double sum = 0;
        for (int64_t j = at; j < end; ++j) sum += std::exp(double{first[j]} - max);
        states.push_back(max);
        states.push_back(static_cast<float>(sum));
        at = end;
      }
    }
    return states;
  }

  // The first k by score, but for rows whose scores lie within two steps of the k-th.
  void ExpectBest(const std::vector<float>& scores, int64_t k, const int32_t* ids) {
    constexpr float kNear = 2.0f / 1024;
    const auto n = static_cast<int64_t>(scores.size()), count = std::min(k, n);
    std::vector<float> sorted(scores);
    for (float& x : sorted) x = std::max(x, -64.0f);
    const std::vector<float> limited(sorted);
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const float last = sorted[static_cast<size_t>(count - 1)];
    std::vector<bool> chosen(scores.size());
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_TRUE(ids[i] >= 0 && ids[i] < n) << ids[i];
      ASSERT_FALSE(chosen[static_cast<size_t>(ids[i])]) << "twice: " << ids[i];
      chosen[static_cast<size_t>(ids[i])] = true;
    }
    for (size_t j = 0; j < scores.size(); ++j) {
      ASSERT_GE(chosen[j] ? limited[j] - last : last - limited[j], -kNear) << "row " << j;
    }
    for (int64_t i = count; i < k; ++i) ASSERT_EQ(ids[i], -1) << "written beyond n";
  }

  void ExpectMatchesReference(const Shape& s) {
    SCOPED_TRACE("kv_heads " + std::to_string(s.kv_heads) + " group " + std::to_string(s.group) +
                 " n " + std::to_string(s.n) + " k " + std::to_string(s.k));
    const int64_t stride = (s.n + 3) / 4 * 4 + 4 * Below(3), heads = s.kv_heads * s.group;
    std::vector<float> scores = RandomNormal(rng_, heads * stride, s.sigma);
    for (int64_t i = 0; i < heads; ++i) {  // heads differ in size
      for (int64_t j = 0; j < stride; ++j) {
        float& x = scores[static_cast<size_t>(i * stride + j)];
        x = j < s.n ? x - 30.0f * static_cast<float>(i % 5) : INFINITY;  // not to be read
      }
    }
    const int64_t parts = 1 + Below(40);
    const DeviceInput<float> device_scores(scores),
        device_states(StatesOf(scores, stride, heads, s.n, parts));
    DeviceOutput<int32_t> ids(s.kv_heads * s.k);
    DeviceOutput<float> base(heads);
    GroupTopKParams params{.scores = device_scores.data(),
                           .states = device_states.data(),
                           .parts = parts,
                           .kv_heads = s.kv_heads,
                           .group = s.group,
                           .n = s.n,
                           .score_stride = stride,
                           .k = s.k,
                           .ids = ids.data(),
                           .base = base.data()};
    const DeviceWorkspace workspace(GroupTopKWorkspaceBytes(params));
    params.workspace = workspace.data();
    for (int call = 0; call < 2; ++call) {  // the first leaves the workspace ready for the second
      ids.Poison();
      ASSERT_EQ(cudaSuccess, GroupTopK(params, nullptr));
      const std::vector<int32_t> found = ids.Get();
      const std::vector<float> found_base = base.Get();
      for (int64_t g = 0; g < s.kv_heads; ++g) {
        const float* of_group = scores.data() + g * s.group * stride;
        std::vector<float> of_heads(static_cast<size_t>(s.group)),
            expected(static_cast<size_t>(s.n));
        for (int64_t h = 0; h < s.group; ++h) {
          of_heads[static_cast<size_t>(h)] =
              static_cast<float>(RefLogSumExp(of_group + h * stride, s.n));
          const float got = found_base[static_cast<size_t>(g * s.group + h)];
          ASSERT_NEAR(got, of_heads[static_cast<size_t>(h)], 1e-5 * std::max(1.0f, std::abs(got)));
        }
        RefGroupScore(of_group, s.group, s.n, stride, of_heads.data(), expected.data());
        ASSERT_NO_FATAL_FAILURE(ExpectBest(expected, s.k, found.data() + g * s.k));
      }
    }
  }
};

TEST_F(GroupTopKGpuTest, RandomShapes_MatchReference) {
  for (int64_t trial = 0; trial < 40; ++trial) {
    const int64_t n = 1 + Below(trial % 5 == 0 ? 70000 : 3000);
    ExpectMatchesReference({1 + Below(5), 1 + Below(16), n, 1 + Below(trial % 3 == 0 ? n + 9 : 600),
                            trial % 4 == 0 ? 40.0f : 3.0f});
    if (HasFatalFailure()) return;
  }
}

TEST_F(GroupTopKGpuTest, EverySmallCount_MatchesReference) {
  for (int64_t n = 1; n < 40; ++n) ExpectMatchesReference({2, 4, n, 1 + Below(40)});
}

TEST_F(GroupTopKGpuTest, AllScoresAlike_FirstAreChosen) {
  const int64_t n = 30'001, k = 1000;
  std::vector<float> scores(static_cast<size_t>(2 * (n + 3)), 1.5f);
  const DeviceInput<float> device_scores(scores), device_states(StatesOf(scores, n + 3, 2, n, 3));
  DeviceOutput<int32_t> ids(k);
  GroupTopKParams params{.scores = device_scores.data(),
                         .states = device_states.data(),
                         .parts = 3,
                         .kv_heads = 1,
                         .group = 2,
                         .n = n,
                         .score_stride = n + 3,
                         .k = k,
                         .ids = ids.data()};
  const DeviceWorkspace workspace(GroupTopKWorkspaceBytes(params));
  params.workspace = workspace.data();
  ASSERT_EQ(cudaSuccess, GroupTopK(params, nullptr));
  const std::vector<int32_t> found = ids.Get();
  for (int64_t i = 0; i < k; ++i) ASSERT_EQ(found[static_cast<size_t>(i)], i);
}

TEST_F(GroupTopKGpuTest, MoreRowsThanSharedMemoryHolds_MatchesReference) {
  ExpectMatchesReference({100, 1, 130'003, 2000});
}

TEST_F(GroupTopKGpuTest, Largest_2048Of1M_MatchesReference) {
  ExpectMatchesReference({4, 4, (1 << 20) - 3, 2048});
}

TEST_F(GroupTopKGpuTest, UnservedShapes_AreRefused) {
  GroupTopKParams params{.parts = 1, .kv_heads = 1, .group = 4, .n = 8, .score_stride = 8, .k = 2};
  EXPECT_EQ(GroupTopK(params, nullptr), cudaErrorInvalidValue) << "no workspace";
  params.score_stride = 10;
  EXPECT_EQ(GroupTopK(params, nullptr), cudaErrorInvalidValue);
  params.score_stride = 8;
  params.group = 17;
  EXPECT_EQ(GroupTopK(params, nullptr), cudaErrorInvalidValue);
  params.group = 4;
  params.k = 0;
  EXPECT_EQ(GroupTopK(params, nullptr), cudaSuccess);
}

// Each head's choice is that of a call in which all heads take as many.
TEST_F(GroupTopKGpuTest, HeadsOfDifferentK_ChooseAsAlone) {
  const int64_t kv_heads = 3, group = 4, n = 9'000 + Below(9'000), stride = (n + 3) / 4 * 4;
  const std::vector<float> scores = RandomNormal(rng_, kv_heads * group * stride, 3.0f);
  const DeviceInput<float> device_scores(scores),
      device_states(StatesOf(scores, stride, kv_heads * group, n, 7));
  const std::vector<int32_t> k = {static_cast<int32_t>(1 + Below(900)), 1,
                                  static_cast<int32_t>(901 + Below(900))};
  const DeviceInput<int32_t> device_k(k);
  GroupTopKParams params{.scores = device_scores.data(),
                         .states = device_states.data(),
                         .parts = 7,
                         .kv_heads = kv_heads,
                         .group = group,
                         .n = n,
                         .score_stride = stride};
  const DeviceWorkspace workspace(GroupTopKWorkspaceBytes(params));
  params.workspace = workspace.data();
  const auto choose = [&](int64_t most, const int32_t* of_head) {
    DeviceOutput<int32_t> ids(kv_heads * most);
    params.k = most;
    params.k_of_head = of_head;
    params.ids = ids.data();
    CARREL_EXPECT_CUDA(GroupTopK(params, nullptr));
    return ids.Get();
  };
  const std::vector<int32_t> found = choose(k[2], device_k.data());
  for (int64_t g = 0; g < kv_heads; ++g) {
    const int64_t own = k[static_cast<size_t>(g)];
    const std::vector<int32_t> alone = choose(own, nullptr);
    for (int64_t i = 0; i < k[2]; ++i) {
      ASSERT_EQ(found[static_cast<size_t>(g * k[2] + i)],
                i < own ? alone[static_cast<size_t>(g * own + i)] : -1)
          << "head " << g << " place " << i;
    }
  }
}

}  // namespace
}  // namespace carrel::kernels
