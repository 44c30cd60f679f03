#include "kernels/encode/code_encode/code_encode.h"
#include "kernels/gpu_test_data.h"
#include "kernels/score/code_score/code_score.h"

namespace carrel::kernels {
namespace {

class CodeEncodeGpuTest : public GpuKernelTest {
 protected:
  std::vector<float> RandomFloats(int64_t count, float scale) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal(rng_);
    return values;
  }

  // Bits must agree except where a product nearly vanishes, and after such a one in a later stage.
  void ExpectMatchesReference(int64_t rows, int64_t head_dim, int64_t bits, int64_t stage_bits) {
    SCOPED_TRACE("rows " + std::to_string(rows) + " head_dim " + std::to_string(head_dim) +
                 " bits " + std::to_string(bits) + " stage " + std::to_string(stage_bits));
    const bool staged = stage_bits < bits;
    const std::vector<uint16_t> x = RandomBf16(rng_, rows * head_dim);
    const std::vector<float> matrix = RandomFloats(bits * head_dim, 1),
                             offset = RandomFloats(bits, 1),
                             feedback = RandomFloats(staged ? bits * bits : 0, 1);
    const DeviceInput<uint16_t> device_x(x);
    const DeviceInput<float> device_matrix(matrix), device_offset(offset),
        device_feedback(feedback);
    const int64_t bytes = (rows + kCodeBlockKeys - 1) / kCodeBlockKeys * CodeBlockBytes(bits);
    DeviceOutput<uint8_t> blocks(bytes);
    CodeEncodeParams params{.x = device_x.data(),
                            .matrix = device_matrix.data(),
                            .offset = device_offset.data(),
                            .feedback = device_feedback.data(),
                            .blocks = blocks.data(),
                            .rows = rows,
                            .head_dim = head_dim,
                            .bits = bits,
                            .stage_bits = stage_bits};
    CARREL_ASSERT_CUDA(CodeEncode(params, nullptr));
    const std::vector<uint8_t> out = blocks.Get();
    std::vector<uint8_t> expected(static_cast<size_t>(bytes), 255);
    std::vector<float> margin(static_cast<size_t>(rows * bits));
    params.x = x.data();
    params.matrix = matrix.data();
    params.offset = offset.data();
    params.feedback = staged ? feedback.data() : nullptr;
    params.blocks = expected.data();
    RefCodeEncode(params, margin.data());
    int64_t other_keys = 0;
    const auto block = [&](const std::vector<uint8_t>& of, int64_t row) {
      return of.data() + row / kCodeBlockKeys * CodeBlockBytes(bits);
    };
    for (int64_t row = 0; row < (rows + 63) / 64 * 64; ++row) {
      for (int64_t i = 0; i < bits; ++i) {
        if (CodeBit(block(out, row), row % kCodeBlockKeys, i) ==
            CodeBit(block(expected, row), row % kCodeBlockKeys, i)) {
          continue;
        }
        ASSERT_LT(row, rows) << "a bit of a key that is not there";
        ASSERT_LT(margin[static_cast<size_t>(row * bits + i)], 1e-3)
            << "row " << row << " bit " << i;
        ++other_keys;
        break;  // what follows from it is no error
      }
    }
    EXPECT_LE(other_keys, 2 + rows / 200);
  }
};

TEST_F(CodeEncodeGpuTest, RandomShapes_MatchReference) {
  for (int64_t trial = 0; trial < 24; ++trial) {
    const int64_t bits = int64_t{64} << trial % 3;
    const int64_t head_dim = 8 * (1 + Below(std::min<int64_t>(256, 32768 / bits) / 8));
    const int64_t stages[] = {bits, 16, bits / 2};
    ExpectMatchesReference(trial == 0 ? 1 : 1 + Below(trial % 6 == 1 ? 5000 : 200), head_dim, bits,
                           stages[Below(3)]);
  }
}

TEST_F(CodeEncodeGpuTest, UsualShapes_MatchReference) {
  ExpectMatchesReference(20000, 128, 128, 128);
  ExpectMatchesReference(20000, 128, 128, 16);
  ExpectMatchesReference(6400, 64, 128, 64);
  ExpectMatchesReference(64, 128, 256, 128);
}

TEST_F(CodeEncodeGpuTest, NaN_GivesZeroBits) {
  const DeviceInput<uint16_t> x(std::vector<uint16_t>(64, 0x7fc0));
  const DeviceInput<float> matrix(RandomFloats(64 * 64, 1)), offset(std::vector<float>(64, 1));
  DeviceOutput<uint8_t> blocks(CodeBlockBytes(64));
  CARREL_ASSERT_CUDA(CodeEncode({.x = x.data(),
                                 .matrix = matrix.data(),
                                 .offset = offset.data(),
                                 .blocks = blocks.data(),
                                 .rows = 1,
                                 .head_dim = 64,
                                 .bits = 64,
                                 .stage_bits = 64},
                                nullptr));
  EXPECT_EQ(blocks.Get(), std::vector<uint8_t>(static_cast<size_t>(CodeBlockBytes(64)), 0));
}

TEST_F(CodeEncodeGpuTest, ShapesNotServed_AreInvalid) {
  uint8_t none = 0;
  CodeEncodeParams params{
      .blocks = &none, .rows = 1, .head_dim = 128, .bits = 128, .stage_bits = 128};
  for (auto [head_dim, bits] : {std::pair<int64_t, int64_t>{12, 128}, {128, 96}, {256, 256}}) {
    params.head_dim = head_dim;
    params.bits = bits;
    EXPECT_EQ(cudaErrorInvalidValue, CodeEncode(params, nullptr)) << head_dim << " " << bits;
  }
}

}  // namespace
}  // namespace carrel::kernels
