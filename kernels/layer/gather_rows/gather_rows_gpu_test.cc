#include "kernels/gpu_test_data.h"
#include "kernels/half_test_data.h"
#include "kernels/layer/gather_rows/gather_rows_cuda.h"

namespace carrel::kernels {
namespace {

class GatherRowsGpuTest : public GpuKernelTest {
 protected:
  std::vector<int32_t> RandomRows(int64_t n, int64_t bound) {
    std::vector<int32_t> rows;
    for (int64_t i = 0; i < n; ++i) rows.push_back(static_cast<int32_t>(Below(bound)));
    return rows;
  }

  // All patterns of bits: NaNs, infinities and denormal numbers among them.
  std::vector<float> RandomBits(int64_t count) {
    const std::vector<uint32_t> words = RandomWords(rng_, count);
    std::vector<float> values(words.size());
    if (count > 0) std::memcpy(values.data(), words.data(), words.size() * sizeof(float));
    return values;
  }

  // x and y begin so many floats after an address that is a multiple of 16 bytes.
  void ExpectSameBits(int64_t n, int64_t width, int64_t table_rows, int64_t x_offset,
                      int64_t y_offset) {
    SCOPED_TRACE(testing::Message() << "n " << n << " width " << width << " of " << table_rows
                                    << " rows, offsets " << x_offset << ", " << y_offset);
    const std::vector<float> x = RandomBits(x_offset + table_rows * width);
    std::vector<int32_t> rows = RandomRows(n, table_rows);
    if (n > 1) rows[0] = static_cast<int32_t>(table_rows - 1);
    if (n > 1) rows[1] = 0;
    const DeviceInput<float> dx(x);
    const DeviceInput<int32_t> drows(rows);
    const DeviceOutput<float> y(y_offset + n * width);
    std::vector<float> want = y.Get();
    RefGatherRows(x.data() + x_offset, rows.data(), n, width, want.data() + y_offset);
    CARREL_ASSERT_CUDA(
        GatherRowsCuda(dx.data() + x_offset, drows.data(), n, width, y.data() + y_offset, nullptr));
    EXPECT_TRUE(SameBits(y.Get(), want));
  }
};

TEST_F(GatherRowsGpuTest, Floats_SameBits) {
  for (const int64_t width : {1, 2, 3, 4, 5, 1023, 1024, 1025, 4096}) {
    for (const int64_t n : {0, 1, 2, 256}) ExpectSameBits(n, width, 1 + Below(300), 0, 0);
  }
  for (int trial = 0; trial < 40; ++trial) {
    ExpectSameBits(Below(600), 1 + Below(3000), 1 + Below(500), 0, 0);
  }
}

TEST_F(GatherRowsGpuTest, FloatsAtAnyAddress_SameBits) {
  for (const int64_t width : {int64_t{4}, int64_t{128}, 1 + Below(2000)}) {
    for (int64_t x_offset = 0; x_offset < 5; ++x_offset) {
      for (int64_t y_offset = 0; y_offset < 5; ++y_offset) {
        ExpectSameBits(1 + Below(50), width, 1 + Below(50), x_offset, y_offset);
      }
    }
  }
}

TEST_F(GatherRowsGpuTest, HalfFloats_AreWidened) {
  for (const int64_t n : {0, 1, 77}) {
    const int64_t width = 2 * (1 + Below(400)), table_rows = 50;
    const std::vector<uint16_t> x = RandomBf16(rng_, table_rows * width);
    const std::vector<int32_t> rows = RandomRows(n, table_rows);
    std::vector<float> want(static_cast<size_t>(n * width));
    RefGatherHalfRows(x.data(), rows.data(), n, width, want.data());
    const DeviceInput<uint16_t> dx(x);
    const DeviceInput<int32_t> drows(rows);
    const DeviceOutput<float> y(n * width);
    CARREL_ASSERT_CUDA(GatherHalfRowsCuda(dx.data(), drows.data(), n, width, y.data(), nullptr));
    EXPECT_EQ(y.Get(), want);
    const std::vector<uint16_t> half = RandomF16(rng_, table_rows * width);
    const std::vector<float> wide = WidenF16(half);
    RefGatherRows(wide.data(), rows.data(), n, width, want.data());
    const DeviceInput<uint16_t> dhalf(half);
    const DeviceOutput<float> from_half(n * width);
    CARREL_ASSERT_CUDA(GatherHalfRowsCuda(dhalf.data(), drows.data(), n, width, from_half.data(),
                                          nullptr, HalfType::kF16));
    EXPECT_EQ(from_half.Get(), want);
  }
}

TEST_F(GatherRowsGpuTest, ShapesThatDoNotFit_AreRefused) {
  EXPECT_EQ(cudaErrorInvalidValue, GatherRowsCuda(nullptr, nullptr, -1, 4, nullptr, nullptr));
  EXPECT_EQ(cudaErrorInvalidValue, GatherRowsCuda(nullptr, nullptr, 1, 0, nullptr, nullptr));
  EXPECT_EQ(cudaErrorInvalidValue, GatherHalfRowsCuda(nullptr, nullptr, 1, 3, nullptr, nullptr));
}

}  // namespace
}  // namespace carrel::kernels
