#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/merge_states/merge_states_cuda.h"
#include "kernels/gpu_test_data.h"

namespace carrel::kernels {
namespace {

class MergeStatesGpuTest : public GpuKernelTest {};

struct State {
  std::vector<float> out, lse;
};

// a after the merge, and it rounded.
struct Merged {
  State state;
  std::vector<uint16_t> rounded;
};

Merged Merge(const State& a, const State& b, int64_t head_dim, bool rounded = true) {
  const auto heads = static_cast<int64_t>(a.lse.size());
  DeviceOutput<float> out(heads * head_dim), lse(heads);
  DeviceOutput<uint16_t> bf16(heads * head_dim);
  CARREL_EXPECT_CUDA(cudaMemcpy(out.data(), a.out.data(), a.out.size() * 4, cudaMemcpyDefault));
  CARREL_EXPECT_CUDA(cudaMemcpy(lse.data(), a.lse.data(), a.lse.size() * 4, cudaMemcpyDefault));
  const DeviceInput<float> out_b(b.out), lse_b(b.lse);
  CARREL_EXPECT_CUDA(MergeStatesCuda({.out_a = out.data(),
                                      .lse_a = lse.data(),
                                      .out_b = out_b.data(),
                                      .lse_b = lse_b.data(),
                                      .out_bf16 = rounded ? bf16.data() : nullptr,
                                      .heads = heads,
                                      .head_dim = head_dim},
                                     nullptr));
  return {{out.Get(), lse.Get()}, bf16.Get()};
}

TEST_F(MergeStatesGpuTest, RandomStates_MatchReference) {
  for (int64_t trial = 0; trial < 40; ++trial) {
    const int64_t heads = Below(40), dim = 1 + Below(trial % 8 == 0 ? 1024 : 130);
    State a{RandomNormal(rng_, heads * dim), RandomNormal(rng_, heads, 5.0f)};
    State b{RandomNormal(rng_, heads * dim), RandomNormal(rng_, heads)};
    for (int64_t h = 0; h < heads; ++h) {
      const float shift = trial % 3 == 0 ? -1e4f : 0.0f;
      a.lse[h] = Below(8) == 0 ? -INFINITY : a.lse[h] + shift;
      b.lse[h] = Below(8) == 0 ? -INFINITY : b.lse[h] + shift;
    }
    State expected = a;
    RefMergeStates(expected.out.data(), expected.lse.data(), b.out.data(), b.lse.data(), heads,
                   dim);
    const Merged merged = Merge(a, b, dim);
    EXPECT_LE(RelativeError(merged.state.out, expected.out), 1e-6);
    ExpectLseNear(merged.state.lse, expected.lse, 1e-6);
    for (size_t i = 0; i < merged.rounded.size(); ++i) {
      ASSERT_EQ(merged.rounded[i], FloatToBf16(merged.state.out[i]));
    }
  }
}

TEST_F(MergeStatesGpuTest, EmptySide_PoisonedOut_OtherSideKeepsItsBits) {
  const State value{RandomNormal(rng_, 3 * 64), RandomNormal(rng_, 3)};
  const State empty{std::vector<float>(3 * 64, NAN), std::vector<float>(3, -INFINITY)};
  for (const auto& [a, b] : {std::pair(value, empty), std::pair(empty, value)}) {
    const Merged merged = Merge(a, b, 64);
    EXPECT_TRUE(SameBits(merged.state.out, value.out));
    EXPECT_TRUE(SameBits(merged.state.lse, value.lse));
  }
}

TEST_F(MergeStatesGpuTest, BothEmpty_StaysEmpty) {
  const State empty{std::vector<float>(8, 0.0f), {-INFINITY}};
  const Merged merged = Merge(empty, empty, 8);
  EXPECT_TRUE(SameBits(merged.state.out, empty.out));
  EXPECT_EQ(merged.state.lse[0], -INFINITY);
}

TEST_F(MergeStatesGpuTest, RoundedNotWanted_IsNotWritten) {
  const State a{RandomNormal(rng_, 64), {1.0f}}, b{RandomNormal(rng_, 64), {2.0f}};
  for (uint16_t bits : Merge(a, b, 64, false).rounded) EXPECT_EQ(bits, 0xffff);
}

}  // namespace
}  // namespace carrel::kernels
