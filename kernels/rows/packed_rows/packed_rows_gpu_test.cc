#include <memory>

#include "kernels/rows/packed_rows/packed_rows_cuda.h"
#include "kernels/rows/packed_rows/packed_rows_gpu_test_data.h"
#include "kernels/rows/packed_rows/packed_rows_test_data.h"

namespace carrel::kernels {
namespace {

class PackedRowsGpuTest : public GpuKernelTest {
 protected:
  // Gathers `count` rows, some of them twice, and compares them with the rows before packing.
  void GatherAndCompare(const std::vector<uint16_t>& k, const std::vector<uint16_t>& v,
                        int64_t kv_heads, int64_t rows, int64_t head_dim, int64_t count) {
    SCOPED_TRACE(testing::Message() << kv_heads << " heads of " << head_dim << ", " << count
                                    << " of " << rows << " rows");
    const PackedInput packed(k.data(), v.data(), kv_heads, rows, head_dim);
    const int64_t ids_stride = count + Below(5);
    std::vector<int32_t> ids(static_cast<size_t>(kv_heads * ids_stride), -7);
    for (int64_t g = 0; g < kv_heads; ++g) {
      for (int64_t i = 0; i < count; ++i)
        ids[static_cast<size_t>(g * ids_stride + i)] = static_cast<int32_t>(Below(rows));
      if (count > 0) ids[static_cast<size_t>(g * ids_stride)] = static_cast<int32_t>(rows - 1);
    }
    const DeviceInput<int32_t> device_ids(ids);
    const DeviceOutput<uint16_t> to_k(kv_heads * count * head_dim),
        to_v(kv_heads * count * head_dim);
    CARREL_ASSERT_CUDA(GatherPackedRowsCuda({.packed = packed.get(),
                                             .ids = device_ids.data(),
                                             .kv_heads = kv_heads,
                                             .head_dim = head_dim,
                                             .ids_stride = ids_stride,
                                             .count = count,
                                             .to = {to_k.data(), to_v.data(), count}},
                                            nullptr));
    const std::vector<uint16_t> got_k = to_k.Get(), got_v = to_v.Get();
    for (int64_t g = 0; g < kv_heads; ++g) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t from = (g * rows + ids[static_cast<size_t>(g * ids_stride + i)]) * head_dim;
        const int64_t at = (g * count + i) * head_dim;
        ASSERT_TRUE(std::equal(k.begin() + from, k.begin() + from + head_dim, got_k.begin() + at))
            << "K, head " << g << " row " << i;
        ASSERT_TRUE(std::equal(v.begin() + from, v.begin() + from + head_dim, got_v.begin() + at))
            << "V, head " << g << " row " << i;
      }
    }
    exceptions_ += packed.exceptions();
  }

  int64_t exceptions_ = 0;
};

TEST_F(PackedRowsGpuTest, NormalRows_SameBits) {
  for (int trial = 0; trial < 20; ++trial) {
    const int64_t heads = 1 + Below(9), rows = 1 + Below(3000), d = trial % 2 == 0 ? 64 : 128;
    const int64_t count = trial < 4 ? trial : Below(2500);
    GatherAndCompare(NormalRows(rng_, heads * rows, d), NormalRows(rng_, heads * rows, d), heads,
                     rows, d, count);
  }
  EXPECT_GT(exceptions_, 0);
}

TEST_F(PackedRowsGpuTest, AnyBits_SameBits) {
  for (const int64_t d : {64, 128}) {
    GatherAndCompare(AnyBits(rng_, 3 * 500 * d), AnyBits(rng_, 3 * 500 * d), 3, 500, d, 700);
  }
}

// A token's rows of an 8B shape.
TEST_F(PackedRowsGpuTest, ManyRows_SameBits) {
  const int64_t heads = 8, rows = 20'000, d = 128;
  GatherAndCompare(RandomBf16(rng_, heads * rows * d), RandomBf16(rng_, heads * rows * d), heads,
                   rows, d, 4096);
}

TEST_F(PackedRowsGpuTest, SequencesTogether_EachHasItsRows) {
  const int64_t heads = 2, d = 128;
  struct One {
    std::vector<uint16_t> k, v;
    std::vector<int32_t> ids;
    int64_t rows, count;
    std::unique_ptr<PackedInput> packed;
    std::unique_ptr<DeviceInput<int32_t>> device_ids;
    std::unique_ptr<DeviceOutput<uint16_t>> to_k, to_v;
  };
  std::vector<One> ones(35);
  std::vector<GatherPackedRowsParams> all;
  for (One& one : ones) {
    one.rows = 1 + Below(2000);
    one.count = Below(700);
    one.k = NormalRows(rng_, heads * one.rows, d);
    one.v = NormalRows(rng_, heads * one.rows, d);
    for (int64_t i = 0; i < heads * one.count; ++i) {
      one.ids.push_back(static_cast<int32_t>(Below(one.rows)));
    }
    one.packed = std::make_unique<PackedInput>(one.k.data(), one.v.data(), heads, one.rows, d);
    one.device_ids = std::make_unique<DeviceInput<int32_t>>(one.ids);
    one.to_k = std::make_unique<DeviceOutput<uint16_t>>(heads * one.count * d);
    one.to_v = std::make_unique<DeviceOutput<uint16_t>>(heads * one.count * d);
    all.push_back({.packed = one.packed->get(),
                   .ids = one.device_ids->data(),
                   .kv_heads = heads,
                   .head_dim = d,
                   .ids_stride = one.count,
                   .count = one.count,
                   .to = {one.to_k->data(), one.to_v->data(), one.count}});
  }
  CARREL_ASSERT_CUDA(GatherPackedRowsCuda(all, nullptr));
  for (const One& one : ones) {
    const std::vector<uint16_t> got_k = one.to_k->Get(), got_v = one.to_v->Get();
    for (int64_t i = 0; i < heads * one.count; ++i) {
      const int64_t from = (i / one.count * one.rows + one.ids[static_cast<size_t>(i)]) * d;
      ASSERT_TRUE(
          std::equal(got_k.begin() + i * d, got_k.begin() + (i + 1) * d, one.k.begin() + from));
      ASSERT_TRUE(
          std::equal(got_v.begin() + i * d, got_v.begin() + (i + 1) * d, one.v.begin() + from));
    }
  }
}

TEST_F(PackedRowsGpuTest, UnservedShapes_AreRefused) {
  const uint8_t row = 0;
  GatherPackedRowsParams params;
  params.packed.rows = &row;
  params.kv_heads = 1;
  params.packed.row_stride = 10;
  params.head_dim = 64;
  EXPECT_EQ(GatherPackedRowsCuda(params, nullptr), cudaSuccess) << "no rows";
  params.count = 1;
  EXPECT_EQ(GatherPackedRowsCuda(params, nullptr), cudaErrorInvalidValue) << "ids_stride 0";
  params.ids_stride = 1;
  params.head_dim = 96;
  EXPECT_EQ(GatherPackedRowsCuda(params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace carrel::kernels
