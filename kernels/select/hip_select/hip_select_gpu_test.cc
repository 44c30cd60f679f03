#include "kernels/gpu_test_data.h"
#include "kernels/select/hip_select/hip_select.h"

namespace carrel::kernels {
namespace {

struct Shape {
  int64_t kv_heads, group, head_dim, rows, block_k, budget;
};

class HipSelectGpuTest : public GpuKernelTest {
 protected:
  void ExpectEqualsReference(const Shape& s) {
    SCOPED_TRACE("kv_heads " + std::to_string(s.kv_heads) + " group " + std::to_string(s.group) +
                 " head_dim " + std::to_string(s.head_dim) + " rows " + std::to_string(s.rows) +
                 " block_k " + std::to_string(s.block_k) + " budget " + std::to_string(s.budget));
    const int64_t row_stride = s.rows + Below(9), ids_stride = s.budget + Below(5);
    const std::vector<uint16_t> q = RandomGridBf16(rng_, s.kv_heads * s.group * s.head_dim);
    const std::vector<uint16_t> k = RandomGridBf16(rng_, s.kv_heads * row_stride * s.head_dim);
    const DeviceInput<uint16_t> device_q(q), device_k(k);
    DeviceOutput<int32_t> ids(s.kv_heads * ids_stride), counts(s.kv_heads);
    const DeviceWorkspace workspace(HipSelectWorkspaceBytes(s.kv_heads, s.block_k, s.budget));
    HipSelectParams params{.q = device_q.data(),
                           .kv = {.k = device_k.data(), .row_stride = row_stride},
                           .kv_heads = s.kv_heads,
                           .group = s.group,
                           .head_dim = s.head_dim,
                           .rows = s.rows,
                           .block_k = s.block_k,
                           .budget = s.budget,
                           .ids = ids.data(),
                           .ids_stride = ids_stride,
                           .row_count = counts.data(),
                           .workspace = workspace.data()};
    std::vector<int32_t> expected(static_cast<size_t>(s.kv_heads * ids_stride), -1);
    std::vector<int32_t> expected_counts(static_cast<size_t>(s.kv_heads));
    for (int again = 0; again < 2; ++again) {  // the workspace is left ready
      ids.Poison();
      counts.Poison();
      ASSERT_EQ(cudaSuccess, HipSelect(params, nullptr));
      const std::vector<int32_t> found = ids.Get(), found_counts = counts.Get();
      if (again == 0) {
        HipSelectParams reference = params;
        reference.q = q.data();
        reference.kv.k = k.data();
        reference.ids = expected.data();
        reference.row_count = expected_counts.data();
        RefHipSelect(reference);
      }
      ASSERT_EQ(found_counts, expected_counts);
      ASSERT_EQ(found, expected);  // what is not written stays -1
    }
  }
};

// In parts, which take a sanitizer minutes: it can check them beside one another.
class HipSelectRandomGpuTest : public HipSelectGpuTest,
                               public testing::WithParamInterface<int64_t> {};
INSTANTIATE_TEST_SUITE_P(FromTrial, HipSelectRandomGpuTest, testing::Range<int64_t>(0, 40, 5));

TEST_P(HipSelectRandomGpuTest, Shapes_EqualReference) {
  rng_.discard(static_cast<uint64_t>(GetParam()));
  for (int64_t trial = GetParam(); trial < GetParam() + 5; ++trial) {
    const int64_t rows = 1 + Below(trial % 4 == 0 ? 9000 : 700);
    const int64_t block_k = trial % 3 == 0 ? 2 : 1 + Below(trial % 3 == 1 ? 9 : 70);
    const int64_t budget = 1 + Below(trial % 5 == 0 ? 2 * rows : 1 + rows / 4);
    ExpectEqualsReference({.kv_heads = 1 + Below(5),
                           .group = 1 + Below(16),
                           .head_dim = trial % 2 == 0 ? 64 : 128,
                           .rows = rows,
                           .block_k = block_k,
                           .budget = std::min(budget, kMaxHipBranches * block_k)});
  }
}

TEST_F(HipSelectGpuTest, OneBlockOrRow_EqualsReference) {
  ExpectEqualsReference({1, 4, 128, 1, 2, 1});
  ExpectEqualsReference({2, 1, 64, 3, 4, 2});
  ExpectEqualsReference({2, 8, 64, 1000, 1024, 7});
  ExpectEqualsReference({2, 9, 64, 2049, 1024, 1});
}

TEST_F(HipSelectGpuTest, MoreHeadsThanSms_EqualsReference) {
  ExpectEqualsReference({200, 1, 64, 300, 2, 64});
}

TEST_F(HipSelectGpuTest, Largest_8192Of200kRows_EqualsReference) {
  ExpectEqualsReference({2, 4, 128, 200'001, 2, 8192});
  ExpectEqualsReference({8, 4, 128, 100'000, 2, 2048});
}

TEST_F(HipSelectGpuTest, UnservedShapes_AreRefused) {
  const HipSelectParams good{.kv = {.row_stride = 4},
                             .kv_heads = 1,
                             .group = 1,
                             .head_dim = 64,
                             .rows = 4,
                             .block_k = 2,
                             .budget = 2,
                             .ids_stride = 2};
  const auto refused = [&](auto change) {
    HipSelectParams params = good;
    change(params);
    EXPECT_EQ(HipSelect(params, nullptr), cudaErrorInvalidValue);
  };
  refused([](auto& p) { p.group = 17; });
  refused([](auto& p) { p.head_dim = 96; });
  refused([](auto& p) { p.rows = 5; });
  refused([](auto& p) { p.block_k = 0; });
  refused([](auto& p) { p.budget = 3; });
  refused([](auto& p) { p.ids_stride = p.budget = 2 * kMaxHipBranches + 2; });
  refused([](auto& p) { p.workspace = nullptr; });
  HipSelectParams empty = good;
  empty.rows = 0;
  EXPECT_EQ(HipSelect(empty, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace carrel::kernels
