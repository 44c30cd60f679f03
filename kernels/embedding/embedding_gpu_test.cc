#include "kernels/embedding/embedding_cuda.h"
#include "kernels/gpu_test_data.h"
#include "kernels/half_test_data.h"

namespace carrel::kernels {
namespace {

class EmbeddingGpuTest : public GpuKernelTest {};

TEST_F(EmbeddingGpuTest, RandomIds_ExactRows) {
  for (int64_t n : {0, 1, 77}) {
    const int64_t dim = 2 * (1 + Below(400)), vocab = 50;
    const std::vector<uint16_t> table = RandomBf16(rng_, vocab * dim);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < n; ++i) ids.push_back(static_cast<int32_t>(Below(vocab)));
    std::vector<float> want(static_cast<size_t>(n * dim));
    RefEmbedding(table.data(), ids.data(), n, dim, want.data());
    const DeviceInput<uint16_t> dtable(table);
    const DeviceInput<int32_t> dids(ids);
    const DeviceOutput<float> y(n * dim);
    ASSERT_EQ(cudaSuccess, EmbeddingCuda(dtable.data(), dids.data(), n, dim, y.data(), nullptr));
    EXPECT_EQ(y.Get(), want);
    const std::vector<uint16_t> half = RandomF16(rng_, vocab * dim);
    const std::vector<float> wide = WidenF16(half);
    want.clear();
    for (const int32_t id : ids) {
      want.insert(want.end(), wide.begin() + id * dim, wide.begin() + (id + 1) * dim);
    }
    const DeviceInput<uint16_t> dhalf(half);
    const DeviceOutput<float> from_half(n * dim);
    ASSERT_EQ(cudaSuccess, EmbeddingCuda(dhalf.data(), dids.data(), n, dim, from_half.data(),
                                         nullptr, HalfType::kF16));
    EXPECT_EQ(from_half.Get(), want);
  }
}

}  // namespace
}  // namespace carrel::kernels
