#include "kernels/gpu_test_data.h"
#include "kernels/select/infinitehip_stage/infinitehip_stage.h"

namespace carrel::kernels {
namespace {

using Range = InfiniteHipRange;

std::vector<int32_t> Flat(const std::vector<Range>& ranges) {
  std::vector<int32_t> flat;
  for (const Range& range : ranges) flat.insert(flat.end(), {range.begin, range.end});
  return flat;
}

struct Shape {
  int64_t kv_heads, group, head_dim, rows;
};
struct Stage {
  int64_t chunk, wanted;
};

class InfiniteHipStageGpuTest : public GpuKernelTest {
 protected:
  // Each stage gets what the device made of the one before.
  void ExpectEqualsReference(const Shape& s, const std::vector<Stage>& stages) {
    SCOPED_TRACE("kv_heads " + std::to_string(s.kv_heads) + " group " + std::to_string(s.group) +
                 " head_dim " + std::to_string(s.head_dim) + " rows " + std::to_string(s.rows));
    const int64_t row_stride = s.rows + Below(9);
    const std::vector<uint16_t> q = RandomGridBf16(rng_, s.kv_heads * s.group * s.head_dim);
    const std::vector<uint16_t> k = RandomGridBf16(rng_, s.kv_heads * row_stride * s.head_dim);
    const DeviceInput<uint16_t> device_q(q), device_k(k);
    std::vector<Range> in;
    std::vector<int32_t> in_count;
    int64_t in_stride = 0, in_rows = 0;
    for (size_t i = 0; i < stages.size(); ++i) {
      SCOPED_TRACE("stage " + std::to_string(i) + " chunk " + std::to_string(stages[i].chunk) +
                   " wanted " + std::to_string(stages[i].wanted));
      const DeviceInput<int32_t> device_in(Flat(in)), device_in_count(in_count);
      InfiniteHipStageParams params{.q = device_q.data(),
                                    .kv = {.k = device_k.data(), .row_stride = row_stride},
                                    .kv_heads = s.kv_heads,
                                    .group = s.group,
                                    .head_dim = s.head_dim,
                                    .rows = s.rows,
                                    .in = reinterpret_cast<const Range*>(device_in.data()),
                                    .in_count = device_in_count.data(),
                                    .in_stride = in_stride,
                                    .in_rows = in_rows,
                                    .chunk = stages[i].chunk,
                                    .wanted = stages[i].wanted};
      params.out_stride = InfiniteHipMostRanges(params) + Below(3);
      params.ids_stride = std::min(s.rows, params.wanted) + Below(3);
      const size_t ranges = static_cast<size_t>(s.kv_heads * params.out_stride);
      const size_t places = static_cast<size_t>(s.kv_heads * params.ids_stride);
      DeviceOutput<int32_t> out(2 * static_cast<int64_t>(ranges)), out_count(s.kv_heads);
      DeviceOutput<int32_t> ids(static_cast<int64_t>(places)), row_count(s.kv_heads);
      const DeviceWorkspace workspace(InfiniteHipStageWorkspaceBytes(params));
      params.out = reinterpret_cast<Range*>(out.data());
      params.out_count = out_count.data();
      params.ids = ids.data();
      params.row_count = row_count.data();
      params.workspace = workspace.data();

      InfiniteHipStageParams reference = params;
      std::vector<Range> expected(ranges, Range{-1, -1});
      std::vector<int32_t> expected_count(static_cast<size_t>(s.kv_heads));
      std::vector<int32_t> expected_rows = expected_count, expected_ids(places, -1);
      reference.q = q.data();
      reference.kv.k = k.data();
      reference.in = in.empty() ? nullptr : in.data();
      reference.in_count = in_count.data();
      reference.out = expected.data();
      reference.out_count = expected_count.data();
      reference.ids = expected_ids.data();
      reference.row_count = expected_rows.data();
      RefInfiniteHipStage(reference);

      for (int again = 0; again < 2; ++again) {  // the workspace is left ready
        for (DeviceOutput<int32_t>* output : {&out, &out_count, &ids, &row_count}) output->Poison();
        ASSERT_EQ(cudaSuccess, InfiniteHipStage(params, nullptr));
        ASSERT_EQ(out_count.Get(), expected_count);
        ASSERT_EQ(out.Get(), Flat(expected));
        ASSERT_EQ(row_count.Get(), expected_rows);
        ASSERT_EQ(ids.Get(), expected_ids);
      }
      in_rows = std::max(in.empty() ? std::min(s.rows, params.chunk) : in_rows, params.chunk);
      if (in.empty() && s.rows <= params.wanted) in_rows = s.rows;
      in = expected;
      in_count = expected_count;
      in_stride = params.out_stride;
    }
  }
};

TEST_F(InfiniteHipStageGpuTest, RandomStages_EqualReference) {
  for (int64_t trial = 0; trial < 40; ++trial) {
    const int64_t rows = 1 + Below(trial % 4 == 0 ? 20000 : 900);
    std::vector<Stage> stages;
    int64_t wanted = rows;
    for (int64_t i = 0; i < 1 + trial % 3; ++i) {
      wanted = 1 + Below(wanted);
      stages.push_back({1 + Below(std::min<int64_t>(wanted, trial % 2 == 0 ? 300 : 20)), wanted});
    }
    ExpectEqualsReference({.kv_heads = 1 + Below(4),
                           .group = 1 + Below(16),
                           .head_dim = trial % 2 == 0 ? 64 : 128,
                           .rows = rows},
                          stages);
  }
}

TEST_F(InfiniteHipStageGpuTest, PublishedStages_EqualReference) {
  ExpectEqualsReference({8, 4, 128, 100'003}, {{256, 32768}, {32, 8192}, {8, 2048}});
}

TEST_F(InfiniteHipStageGpuTest, MoreRowsWantedThanThere_GoOnAsTheyAre) {
  ExpectEqualsReference({3, 2, 64, 777}, {{256, 777}, {32, 5000}, {8, 64}});
}

TEST_F(InfiniteHipStageGpuTest, ChunksOfOneRow_IsTopK) {
  ExpectEqualsReference({2, 4, 64, 30'000}, {{1, 4096}, {1, 100}, {1, 1}});
}

TEST_F(InfiniteHipStageGpuTest, UnservedShapes_AreRefused) {
  const InfiniteHipStageParams good{.kv = {.row_stride = 64},
                                    .kv_heads = 1,
                                    .group = 1,
                                    .head_dim = 64,
                                    .rows = 64,
                                    .chunk = 8,
                                    .wanted = 16,
                                    .out_stride = 2};
  const auto refused = [&](auto change) {
    InfiniteHipStageParams params = good;
    int32_t nowhere = 0;
    params.workspace = &nowhere;
    change(params);
    EXPECT_EQ(InfiniteHipStage(params, nullptr), cudaErrorInvalidValue);
  };
  refused([](auto& p) { p.group = 17; });
  refused([](auto& p) { p.head_dim = 96; });
  refused([](auto& p) { p.rows = 65; });
  refused([](auto& p) { p.chunk = 17; });
  refused([](auto& p) { p.out_stride = 1; });
  refused([](auto& p) { p.workspace = nullptr; });
  InfiniteHipStageParams empty = good;
  empty.rows = 0;
  EXPECT_EQ(InfiniteHipStage(empty, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace carrel::kernels
