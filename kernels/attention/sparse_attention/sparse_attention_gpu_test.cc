#include <memory>
#include <numeric>

#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/decode_case.h"

namespace carrel::kernels {
namespace {

using RowLists = std::vector<std::vector<int32_t>>;

class SparseAttentionGpuTest : public GpuKernelTest {
 protected:
  // Distinct rows, in random order.
  std::vector<int32_t> Choose(int64_t of, int64_t count) {
    std::vector<int32_t> all(static_cast<size_t>(of));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), rng_);
    all.resize(static_cast<size_t>(count));
    return all;
  }
};

struct Options {
  int64_t splits = 1;
  KvView kv;  // instead of the copies in device memory
};

AttentionResult Attend(const DecodeCase& c, const RowLists& rows, const Options& options) {
  const DecodeShape& s = c.shape;
  DeviceDecodeCase device(c);
  int64_t stride = 1;
  std::vector<int32_t> counts;
  for (const auto& list : rows) {
    stride = std::max(stride, static_cast<int64_t>(list.size()));
    counts.push_back(static_cast<int32_t>(list.size()));
  }
  std::vector<int32_t> ids(static_cast<size_t>(s.kv_heads * stride), INT32_MAX);  // not to be read
  for (size_t g = 0; g < rows.size(); ++g) {
    std::copy(rows[g].begin(), rows[g].end(), ids.begin() + static_cast<int64_t>(g) * stride);
  }
  const DeviceInput<int32_t> device_ids(ids), row_count(counts);
  const DeviceWorkspace workspace(
      DecodeWorkspaceBytes(s.kv_heads, s.group, s.head_dim, options.splits));
  CARREL_EXPECT_CUDA(SparseAttentionCuda({.q = device.q.data(),
                                          .kv = options.kv.k != nullptr ? options.kv : device.kv(),
                                          .ids = device_ids.data(),
                                          .kv_heads = s.kv_heads,
                                          .group = s.group,
                                          .head_dim = s.head_dim,
                                          .ids_stride = stride,
                                          .row_count = row_count.data(),
                                          .scale = c.scale,
                                          .out = device.out.data(),
                                          .lse = device.lse.data(),
                                          .splits = options.splits,
                                          .workspace = workspace.data()},
                                         nullptr));
  return device.Get();
}

TEST_F(SparseAttentionGpuTest, RandomRows_EachHeadItsOwnCount_MatchReference) {
  for (int64_t trial = 0; trial < 60; ++trial) {
    const DecodeShape shape{.kv_heads = 1 + Below(5),
                            .group = 1 + Below(16),
                            .head_dim = trial % 2 == 0 ? 64 : 128,
                            .row_stride = 1 + Below(trial % 6 == 0 ? 5000 : 200)};
    const DecodeCase c(rng_, shape, trial % 4 == 0 ? 100.0f : 1.0f);
    RowLists rows;
    for (int64_t g = 0; g < shape.kv_heads; ++g) {
      rows.push_back(Choose(shape.row_stride, Below(shape.row_stride + 1)));
    }
    const int64_t splits =
        trial % 3 == 0 ? DecodeSplits(shape.row_stride, shape.kv_heads) : 1 + Below(40);
    SCOPED_TRACE(shape.Name() + " splits " + std::to_string(splits));
    ExpectNear(Attend(c, rows, {.splits = splits}), c.Expected(rows));
  }
}

TEST_F(SparseAttentionGpuTest, EmptyAndFullHeadsTogether_EmptyIsZero) {
  const DecodeCase c(rng_, {.kv_heads = 3, .group = 2, .head_dim = 64, .row_stride = 50});
  const RowLists rows = {{}, Choose(50, 50), {}};
  const AttentionResult result = Attend(c, rows, {.splits = 4});
  ExpectNear(result, c.Expected(rows));
  for (size_t h : {0, 1, 4, 5}) {
    EXPECT_EQ(result.lse[h], -INFINITY);
    for (size_t i = h * 64; i < (h + 1) * 64; ++i) EXPECT_EQ(result.out[i], 0.0f);
  }
}

TEST_F(SparseAttentionGpuTest, OneRow_WeightExactlyOne) {
  const DecodeCase c(rng_, {.kv_heads = 1, .group = 4, .head_dim = 128, .row_stride = 9});
  const AttentionResult result = Attend(c, {{5}}, {});
  for (size_t i = 0; i < 4 * 128; ++i) {
    EXPECT_EQ(result.out[i], Bf16ToFloat(c.v[5 * 128 + i % 128]));
  }
}

TEST_F(SparseAttentionGpuTest, RowListedTwice_CountsTwice) {
  const DecodeCase c(rng_, {.kv_heads = 1, .group = 3, .head_dim = 64, .row_stride = 30});
  std::vector<int32_t> twice = Choose(30, 20);
  const std::vector<int32_t> once = twice;
  twice.insert(twice.end(), once.begin(), once.begin() + 7);
  ExpectNear(Attend(c, {twice}, {.splits = 2}), c.Expected({twice}));
}

TEST_F(SparseAttentionGpuTest, RowsInPinnedHostMemory_SameBitsAsOnDevice) {
  const DecodeCase c(rng_, {.kv_heads = 2, .group = 4, .head_dim = 128, .row_stride = 3000});
  void *k = nullptr, *v = nullptr;
  CARREL_ASSERT_CUDA(cudaMallocHost(&k, c.k.size() * 2));
  CARREL_ASSERT_CUDA(cudaMallocHost(&v, c.v.size() * 2));
  std::memcpy(k, c.k.data(), c.k.size() * 2);
  std::memcpy(v, c.v.data(), c.v.size() * 2);
  const RowLists rows = {Choose(3000, 511), Choose(3000, 64)};
  const AttentionResult pinned = Attend(
      c, rows,
      {.splits = 8, .kv = {static_cast<Bf16*>(k), static_cast<Bf16*>(v), c.shape.row_stride}});
  const AttentionResult device = Attend(c, rows, {.splits = 8});
  EXPECT_TRUE(SameBits(pinned.out, device.out));
  EXPECT_TRUE(SameBits(pinned.lse, device.lse));
  ExpectNear(pinned, c.Expected(rows));
  CARREL_EXPECT_CUDA(cudaFreeHost(k));
  CARREL_EXPECT_CUDA(cudaFreeHost(v));
}

TEST_F(SparseAttentionGpuTest, SequencesTogether_EachHasTheBitsItHasAlone) {
  std::vector<std::unique_ptr<DecodeCase>> cases;
  std::vector<std::unique_ptr<DeviceDecodeCase>> devices;
  std::vector<std::unique_ptr<DeviceInput<int32_t>>> ids;
  std::vector<std::unique_ptr<DeviceWorkspace>> workspaces;
  std::vector<AttentionResult> alone;
  std::vector<SparseAttentionCudaParams> all;
  for (int64_t i = 0; i < 40; ++i) {
    const int64_t rows = 1 + Below(900), chosen = 1 + Below(rows), splits = 1 + Below(7);
    cases.push_back(std::make_unique<DecodeCase>(
        rng_, DecodeShape{.kv_heads = 2, .group = 4, .head_dim = 128, .row_stride = rows}));
    devices.push_back(std::make_unique<DeviceDecodeCase>(*cases.back()));
    std::vector<int32_t> of_heads;
    for (int head = 0; head < 2; ++head) {
      const std::vector<int32_t> of_head = Choose(rows, chosen);
      of_heads.insert(of_heads.end(), of_head.begin(), of_head.end());
    }
    ids.push_back(std::make_unique<DeviceInput<int32_t>>(of_heads));
    workspaces.push_back(
        std::make_unique<DeviceWorkspace>(DecodeWorkspaceBytes(2, 4, 128, splits)));
    all.push_back({.q = devices.back()->q.data(),
                   .kv = devices.back()->kv(),
                   .ids = ids.back()->data(),
                   .kv_heads = 2,
                   .group = 4,
                   .head_dim = 128,
                   .ids_stride = chosen,
                   .rows = chosen,
                   .scale = cases.back()->scale,
                   .out = devices.back()->out.data(),
                   .lse = devices.back()->lse.data(),
                   .splits = splits,
                   .workspace = workspaces.back()->data()});
    CARREL_ASSERT_CUDA(SparseAttentionCuda(all.back(), nullptr));
    alone.push_back(devices.back()->Get());
    devices.back()->Poison();
  }
  CARREL_ASSERT_CUDA(SparseAttentionCuda(all, nullptr));
  for (size_t i = 0; i < alone.size(); ++i) {
    const AttentionResult together = devices[i]->Get();
    EXPECT_TRUE(SameBits(together.out, alone[i].out)) << i;
    EXPECT_TRUE(SameBits(together.lse, alone[i].lse)) << i;
  }
}

TEST_F(SparseAttentionGpuTest, Largest_4096Of500kRows_MatchReference) {
  const DecodeCase c(rng_, {.kv_heads = 2, .group = 4, .head_dim = 128, .row_stride = 500'000});
  const RowLists rows = {Choose(500'000, 4096), Choose(500'000, 4096)};
  ExpectNear(Attend(c, rows, {.splits = DecodeSplits(4096, 2)}), c.Expected(rows));
}

TEST_F(SparseAttentionGpuTest, UnservedShapes_AreRefused) {
  SparseAttentionCudaParams params{.kv = {.row_stride = 8},
                                   .kv_heads = 1,
                                   .group = 1,
                                   .head_dim = 64,
                                   .ids_stride = 4,
                                   .rows = 5,
                                   .scale = 1,
                                   .splits = 1,
                                   .workspace = &params};
  EXPECT_EQ(SparseAttentionCuda(params, nullptr), cudaErrorInvalidValue);
  params.rows = 4;
  params.head_dim = 32;
  EXPECT_EQ(SparseAttentionCuda(params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace carrel::kernels
