#define HWY_WANT_AVX3_DL 1  // as quantized_linear.cc, whose targets are all tested

#include "kernels/layer/quantized_linear/quantized_linear.h"

#include "kernels/layer/linear/linear.h"
#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST_WITH_AMX(QuantizedLinearTest);

constexpr GgufType kTypes[] = {
    GgufType::kQ4_0,  GgufType::kQ4_1, GgufType::kQ5_0,   GgufType::kQ5_1,
    GgufType::kQ8_0,  GgufType::kQ2_K, GgufType::kQ3_K,   GgufType::kQ4_K,
    GgufType::kQ5_K,  GgufType::kQ6_K, GgufType::kIQ4_NL, GgufType::kIQ4_XS,
    GgufType::kMxfp4, GgufType::kF16,  GgufType::kBf16,   GgufType::kF32};

// Byte offsets of a block's fp16 numbers.
std::vector<int64_t> HalvesOf(GgufType type) {
  switch (type) {
    case GgufType::kQ4_1:
    case GgufType::kQ5_1:
    case GgufType::kQ4_K:
    case GgufType::kQ5_K:
      return {0, 2};
    case GgufType::kQ2_K:
      return {80, 82};
    case GgufType::kQ3_K:
      return {108};
    case GgufType::kQ6_K:
      return {208};
    case GgufType::kMxfp4:
    case GgufType::kBf16:
    case GgufType::kF32:
      return {};
    default:
      return {0};
  }
}

// Random blocks and bias, at odd addresses, ending with their allocations.
class QuantizedWeights {
 public:
  QuantizedWeights(std::mt19937_64& rng, GgufType type, int64_t out, int64_t in, bool bias)
      : data_(static_cast<size_t>(1 + out * GgufBytes(type, in))),
        bias_(static_cast<size_t>(1 + out * 4)) {
    for (uint8_t& byte : data_) byte = static_cast<uint8_t>(rng());
    const int64_t bytes = TraitsOf(type).block_bytes;
    for (size_t block = 1; block < data_.size(); block += static_cast<size_t>(bytes)) {
      for (const int64_t at : HalvesOf(type)) {
        // Of either sign, 2^-7 to 1.
        const auto half = static_cast<uint16_t>((rng() & 0x8000) | (0x2000 + rng() % 0x1c00));
        std::memcpy(data_.data() + block + at, &half, sizeof(half));
      }
      if (type == GgufType::kMxfp4) data_[block] = static_cast<uint8_t>(118 + rng() % 10);
      // The byte that holds most of the exponent.
      if (type == GgufType::kBf16) data_[block + 1] = static_cast<uint8_t>(60 + rng() % 4);
      if (type == GgufType::kF32) data_[block + 3] = static_cast<uint8_t>(60 + rng() % 4);
    }
    const std::vector<float> values = RandomNormal(rng, out);
    std::memcpy(bias_.data() + 1, values.data(), static_cast<size_t>(out) * sizeof(float));
    matrix_ = {data_.data() + 1, type, out, in, bias ? bias_.data() + 1 : nullptr};
  }
  const QuantizedMatrix& matrix() const { return matrix_; }

  // Every byte but those of fp16 numbers and of MXFP4's exponents.
  void FillNumbers(uint8_t byte) {
    const int64_t bytes = TraitsOf(matrix_.type).block_bytes;
    for (size_t i = 1; i < data_.size(); ++i) {
      const auto at = static_cast<int64_t>((i - 1) % static_cast<size_t>(bytes));
      bool number = matrix_.type != GgufType::kMxfp4 || at != 0;
      for (const int64_t half : HalvesOf(matrix_.type)) number &= at != half && at != half + 1;
      if (number) data_[i] = byte;
    }
  }

  // What the rounding errors of y are proportional to.
  double Scale(const std::vector<float>& x) const {
    std::vector<float> w(static_cast<size_t>(matrix_.out * matrix_.in));
    Dequantize(matrix_.type, matrix_.data, matrix_.out * matrix_.in, w.data());
    return Norm(x) * Norm(w) + 100;
  }

 private:
  std::vector<uint8_t> data_, bias_;
  QuantizedMatrix matrix_;
};

std::vector<float> Scratch(const QuantizedMatrix& w) {
  return std::vector<float>(static_cast<size_t>(QuantizedLinearScratchFloats(w)), NAN);
}

TEST_P(QuantizedLinearTest, RandomShapes_EveryType_MatchesReference) {
  for (const GgufType type : kTypes) {
    const int64_t block = TraitsOf(type).block_elements;
    for (int64_t trial = 0; trial < 12; ++trial) {
      const int64_t n = Below(trial % 5 == 0 ? 140 : 9), out = 1 + Below(trial % 4 == 0 ? 300 : 20);
      const int64_t in = (1 + Below(block == 32 ? 20 : 4)) * block, x_stride = in + Below(3);
      const int64_t y_stride = out + Below(3);
      SCOPED_TRACE(absl::StrCat(TraitsOf(type).name, " n ", n, " out ", out, " in ", in));
      const QuantizedWeights w(rng_, type, out, in, trial % 2 == 0);
      const std::vector<float> x = RandomNormal(rng_, n * x_stride);
      std::vector<float> scratch = Scratch(w.matrix());
      GuardedFloats y(n * y_stride);
      std::vector<float> expected = y.vector();
      QuantizedLinear(x.data(), n, x_stride, w.matrix(), y.data(), y_stride, scratch.data());
      RefQuantizedLinear(x.data(), n, x_stride, w.matrix(), expected.data(), y_stride);
      ExpectNear(y.span(), expected, w.Scale(x), 1e-5);
    }
  }
}

// Numbers of 16 bits with a largest one of 32767 in every 32 are kept exactly: what is left are the
// roundings of fp32.
TEST_P(QuantizedLinearTest, NumbersOf16Bits_EveryType_OnlySumsAreRounded) {
  for (const GgufType type : kTypes) {
    for (const int64_t n : {1, 2, 3, 4, 7, 31, 63, 70}) {
      const int64_t out = 9, in = TraitsOf(type).block_elements == 256 ? 768 : 32 * (16 + n);
      SCOPED_TRACE(absl::StrCat(TraitsOf(type).name, " n ", n, " in ", in));
      const QuantizedWeights w(rng_, type, out, in, false);
      std::vector<float> x(static_cast<size_t>(n * in));
      for (size_t i = 0; i < x.size(); i += 32) {
        const float step = std::ldexp(1.0f, static_cast<int>(Below(20)) - 20);
        for (size_t c = i; c < i + 32; ++c) x[c] = static_cast<float>(Below(65535) - 32767) * step;
        x[i + static_cast<size_t>(Below(32))] = (Below(2) == 0 ? 32767 : -32767) * step;
      }
      std::vector<float> scratch = Scratch(w.matrix());
      GuardedFloats y(n * out), expected(n * out);
      QuantizedLinear(x.data(), n, in, w.matrix(), y.data(), out, scratch.data());
      RefQuantizedLinear(x.data(), n, in, w.matrix(), expected.data(), out);
      // With AMX their low parts are not multiplied with each other; Q6_K takes 15 bits.
      const bool rounded =
          type == GgufType::kQ6_K || (AmxUsed() && n > QuantizedTokensAlike(w.matrix()));
      const double parts = rounded ? 7e-5 / std::sqrt(in) : 0;
      ExpectNear(y.span(), expected.span(), w.Scale(x), 3e-7 + parts);
    }
  }
}

// Beside exact products in double, as a share of y itself.
TEST_P(QuantizedLinearTest, ManyTokens_EveryType_NearExactProducts) {
  for (const GgufType type : kTypes) {
    const int64_t n = 64 + Below(100), out = 1 + Below(80), in = 256 * (1 + Below(6));
    SCOPED_TRACE(absl::StrCat(TraitsOf(type).name, " n ", n, " out ", out, " in ", in));
    const QuantizedWeights w(rng_, type, out, in, false);
    const std::vector<float> x = RandomNormal(rng_, n * in);
    std::vector<float> scratch = Scratch(w.matrix());
    GuardedFloats y(n * out), expected(n * out);
    QuantizedLinear(x.data(), n, in, w.matrix(), y.data(), out, scratch.data());
    RefQuantizedLinear(x.data(), n, in, w.matrix(), expected.data(), out);
    ExpectNear(y.span(), expected.span(), Norm(expected.span()),
               type == GgufType::kQ6_K ? 8e-5 : 4e-5);
  }
}

// The largest sums that integers can come to: they must not overflow.
TEST_P(QuantizedLinearTest, LargestIntegers_EveryType_NoOverflow) {
  for (const GgufType type : kTypes) {
    if (!TraitsOf(type).quantized) continue;
    for (const uint8_t byte : {0x00, 0x80, 0x7f, 0xff}) {
      for (const int64_t n : {1, 64}) {
        const int64_t out = 2, in = 512;
        SCOPED_TRACE(absl::StrCat(TraitsOf(type).name, " n ", n, " bytes ", byte));
        QuantizedWeights w(rng_, type, out, in, false);
        w.FillNumbers(byte);
        for (const float sign : {1.0f, -1.0f}) {
          const std::vector<float> x(static_cast<size_t>(n * in), sign * 3);
          std::vector<float> scratch = Scratch(w.matrix());
          GuardedFloats y(n * out), expected(n * out);
          QuantizedLinear(x.data(), n, in, w.matrix(), y.data(), out, scratch.data());
          RefQuantizedLinear(x.data(), n, in, w.matrix(), expected.data(), out);
          ExpectNear(y.span(), expected.span(), w.Scale(x), 1e-4);
        }
      }
    }
  }
}

TEST_P(QuantizedLinearTest, TokensSplitAtTiles_AnyCount_SameBits) {
  for (const GgufType type : kTypes) {
    const int64_t n = 1 + Below(300), out = 1 + Below(150), in = 256 * (1 + Below(3));
    SCOPED_TRACE(absl::StrCat(TraitsOf(type).name, " n ", n, " out ", out, " in ", in));
    const QuantizedWeights w(rng_, type, out, in, true);
    const std::vector<float> x = RandomNormal(rng_, n * in);
    std::vector<float> scratch = Scratch(w.matrix());
    GuardedFloats whole(n * out), split(n * out);
    QuantizedLinear(x.data(), n, in, w.matrix(), whole.data(), out, scratch.data());
    for (int64_t begin = 0; begin < n;) {
      const int64_t count = std::min(n - begin, (1 + Below(3)) * kLinearTokenTile);
      QuantizedLinear(x.data() + begin * in, count, in, w.matrix(), split.data() + begin * out, out,
                      scratch.data());
      begin += count;
    }
    EXPECT_TRUE(SameBits(whole.span(), split.span()));
  }
}

// Tokens [begin, end) with rows [0, cut) and [cut, out); packed: x by PackTokens, or null.
void MultiplyInParts(const std::vector<float>& x, int64_t begin, int64_t end, int64_t cut,
                     const QuantizedMatrix& w, const float* packed, float* y) {
  std::vector<float> scratch = Scratch(w);
  const float* from = x.data() + begin * w.in;
  float* const to = y + begin * w.out;
  QuantizedLinear(from, end - begin, w.in, w.Rows(0, cut), to, w.out, scratch.data(), packed);
  QuantizedLinear(from, end - begin, w.in, w.Rows(cut, w.out), to + cut, w.out, scratch.data(),
                  packed);
}

// Among as many as QuantizedTokensAlike says, and however tokens and outputs are cut.
TEST_P(QuantizedLinearTest, TokensAlike_AnyCountAndCuts_BitsOfEachAlone) {
  for (const GgufType type : kTypes) {
    const int64_t block = TraitsOf(type).block_elements;
    const int64_t most = 256, in = block * (1 + Below(block == 32 ? 25 : 4)), out = 2 + Below(75);
    const QuantizedWeights w(rng_, type, out, in, true);
    const std::vector<float> x = RandomNormal(rng_, most * in);
    const int64_t alike = QuantizedTokensAlike(w.matrix());
    EXPECT_GE(alike, kQuantizedGemmTokens - 1);
    GuardedFloats alone(most * out);
    for (int64_t i = 0; i < most; ++i) {
      MultiplyInParts(x, i, i + 1, 1 + Below(out - 1), w.matrix(), nullptr, alone.data());
    }
    std::vector<int64_t> counts = {most};
    for (int64_t n = 1; n <= 70; ++n) counts.push_back(n);
    for (const int64_t n : counts) {
      if (n > alike) continue;
      const int64_t cut = 1 + Below(out - 1), split = Below(n);
      SCOPED_TRACE(absl::StrCat(TraitsOf(type).name, " n ", n, " in ", in, " out ", out, " cut ",
                                cut, " split ", split));
      const absl::Span<const float> expected = alone.span().subspan(0, n * out);
      std::vector<float> scratch = Scratch(w.matrix());
      GuardedFloats whole(n * out), shared(n * out), parts(n * out);
      QuantizedLinear(x.data(), n, in, w.matrix(), whole.data(), out, scratch.data());
      EXPECT_TRUE(SameBits(whole.span(), expected));
      std::vector<float> packed(static_cast<size_t>(PackedTokensFloats(w.matrix(), n)), NAN);
      PackTokens(x.data(), n, in, w.matrix(), packed.data());
      MultiplyInParts(x, 0, n, cut, w.matrix(), packed.empty() ? nullptr : packed.data(),
                      shared.data());
      EXPECT_TRUE(SameBits(shared.span(), expected));
      MultiplyInParts(x, 0, split, cut, w.matrix(), nullptr, parts.data());
      MultiplyInParts(x, split, n, cut, w.matrix(), nullptr, parts.data());
      EXPECT_TRUE(SameBits(parts.span(), expected));
    }
  }
}

TEST_P(QuantizedLinearTest, BlockProducts_AnyTarget_BitsOfAvx2) {
  for (const GgufType type : kTypes) {
    const int64_t block = TraitsOf(type).block_elements;
    for (const int64_t end : {0, 1, 2, 4, 7}) {  // blocks behind a row's last 256 numbers
      if (block != 32 && end > 0) continue;
      const int64_t n = 1 + Below(40), out = 1 + Below(75), in = 256 * (1 + Below(3)) + end * block;
      SCOPED_TRACE(absl::StrCat(TraitsOf(type).name, " n ", n, " in ", in, " out ", out));
      const QuantizedWeights w(rng_, type, out, in, true);
      if (QuantizedTokensAlike(w.matrix()) != kAnyTokens) continue;
      const std::vector<float> x = RandomNormal(rng_, n * in);
      std::vector<float> scratch = Scratch(w.matrix());
      GuardedFloats here(n * out), avx2(n * out);
      QuantizedLinear(x.data(), n, in, w.matrix(), here.data(), out, scratch.data());
      hwy::SetSupportedTargetsForTest(HWY_AVX2);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      QuantizedLinear(x.data(), n, in, w.matrix(), avx2.data(), out, scratch.data());
      SetUp();
      EXPECT_TRUE(SameBits(here.span(), avx2.span()));
    }
  }
}

TEST_P(QuantizedLinearTest, ManyTokens_PackedInTilesAndSplitByOutputs_SameBits) {
  for (const GgufType type : kTypes) {
    const int64_t n = kQuantizedGemmTokens + Below(260), out = 2 + Below(100);
    const int64_t in = 256 * (1 + Below(3)), cut = 1 + Below(out - 1);
    SCOPED_TRACE(absl::StrCat(TraitsOf(type).name, " n ", n, " out ", out, " cut ", cut));
    const QuantizedWeights w(rng_, type, out, in, true);
    const std::vector<float> x = RandomNormal(rng_, n * in);
    std::vector<float> scratch = Scratch(w.matrix());
    const int64_t floats = PackedTokensFloats(w.matrix(), n);
    if (floats == 0) continue;
    std::vector<float> packed(static_cast<size_t>(floats), NAN);
    for (int64_t begin = 0; begin < n; begin += kLinearTokenTile) {
      PackTokens(x.data() + begin * in, std::min(kLinearTokenTile, n - begin), in, w.matrix(),
                 packed.data() + floats / n * begin);
    }
    GuardedFloats whole(n * out), parts(n * out);
    QuantizedLinear(x.data(), n, in, w.matrix(), whole.data(), out, scratch.data());
    QuantizedLinear(x.data(), n, in, w.matrix().Rows(0, cut), parts.data(), out, scratch.data(),
                    packed.data());
    QuantizedLinear(x.data(), n, in, w.matrix().Rows(cut, out), parts.data() + cut, out,
                    scratch.data(), packed.data());
    EXPECT_TRUE(SameBits(whole.span(), parts.span()));
  }
}

TEST_P(QuantizedLinearTest, InputThatIsNoNumber_AnyPlace_GivesNan) {
  for (const GgufType type : kTypes) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      for (const int64_t n : {1, 64}) {
        const int64_t out = 3, in = 512, token = Below(n);
        SCOPED_TRACE(absl::StrCat(TraitsOf(type).name, " ", bad, " n ", n));
        const QuantizedWeights w(rng_, type, out, in, false);
        std::vector<float> x = RandomNormal(rng_, n * in);
        x[static_cast<size_t>(token * in + Below(in))] = bad;
        std::vector<float> scratch = Scratch(w.matrix());
        GuardedFloats y(n * out);
        QuantizedLinear(x.data(), n, in, w.matrix(), y.data(), out, scratch.data());
        for (int64_t i = 0; i < n * out; ++i) {
          EXPECT_EQ(std::isfinite(y.data()[i]), i / out != token);
        }
      }
    }
  }
}

TEST_P(QuantizedLinearTest, Widen_EveryType_NumbersOfDequantize) {
  for (const GgufType type : kTypes) {
    const int64_t in = 256 * (1 + Below(5));
    SCOPED_TRACE(TraitsOf(type).name);
    const QuantizedWeights w(rng_, type, 1, in, false);
    GuardedFloats widened(in);
    std::vector<float> expected(static_cast<size_t>(in));
    Widen(type, w.matrix().data, in, widened.data());
    Dequantize(type, w.matrix().data, in, expected.data());
    for (int64_t i = 0; i < in; ++i) ASSERT_EQ(widened.data()[i], expected[i]) << "at " << i;
  }
}

TEST_P(QuantizedLinearTest, NoTokens_AnyPointer_WritesNothing) {
  const QuantizedWeights w(rng_, GgufType::kQ4_0, 3, 64, true);
  GuardedFloats y(3);
  QuantizedLinear(nullptr, 0, 64, w.matrix(), y.data(), 3, nullptr);
  EXPECT_TRUE(y.Untouched(0));
}

}  // namespace
}  // namespace carrel::kernels
