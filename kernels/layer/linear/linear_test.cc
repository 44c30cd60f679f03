#include "kernels/layer/linear/linear.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST_WITH_AMX(LinearTest);

// Random weights and bias of a dtype, at odd addresses, ending with their allocations.
class Weights {
 public:
  Weights(std::mt19937_64& rng, DType dtype, int64_t out, int64_t in, bool bias)
      : data_(Encode(rng, dtype, out * in)), bias_(Encode(rng, dtype, out)) {
    matrix_ = {data_.data() + 1, dtype, out, in, bias ? bias_.data() + 1 : nullptr};
  }
  const WeightMatrix& matrix() const { return matrix_; }

  // What the rounding errors of y are proportional to.
  double Scale(const std::vector<float>& x, int64_t n) const {
    std::vector<float> w(static_cast<size_t>(matrix_.out * matrix_.in));
    std::vector<float> bias(static_cast<size_t>(matrix_.out));
    WidenToFloat(matrix_.dtype, matrix_.data, matrix_.out * matrix_.in, w.data());
    if (matrix_.bias != nullptr) {
      WidenToFloat(matrix_.dtype, matrix_.bias, matrix_.out, bias.data());
    }
    return Norm(x) * Norm(w) + Norm(bias) * std::sqrt(static_cast<double>(n));
  }

 private:
  static std::vector<uint8_t> Encode(std::mt19937_64& rng, DType dtype, int64_t count) {
    const int64_t bytes = DTypeBytes(dtype);
    std::vector<uint8_t> encoded(1 + count * bytes);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) {
      const float x = normal(rng);
      uint16_t bits = FloatToBf16(x);
      // Any bits with a small exponent are a number of fp16.
      if (dtype == DType::kF16) bits = static_cast<uint16_t>(rng() & 0xbfff);
      const void* from = dtype == DType::kF32 ? static_cast<const void*>(&x) : &bits;
      std::memcpy(encoded.data() + 1 + i * bytes, from, static_cast<size_t>(bytes));
    }
    return encoded;
  }

  std::vector<uint8_t> data_, bias_;
  WeightMatrix matrix_;
};

std::vector<float> Scratch(const WeightMatrix& w) {
  return std::vector<float>(static_cast<size_t>(LinearScratchFloats(w)), NAN);
}

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBf16};

TEST_P(LinearTest, RandomShapes_EveryDType_MatchesReference) {
  for (int64_t trial = 0; trial < 90; ++trial) {
    const DType dtype = kDTypes[trial % 3];
    const int64_t n = Below(trial % 5 == 0 ? 140 : 20), out = 1 + Below(trial % 4 == 0 ? 300 : 40);
    const int64_t in = 1 + Below(150), x_stride = in + Below(3), y_stride = out + Below(3);
    SCOPED_TRACE(absl::StrCat(DTypeName(dtype), " n ", n, " out ", out, " in ", in));
    const Weights w(rng_, dtype, out, in, trial % 2 == 0);
    const std::vector<float> x = RandomNormal(rng_, n * x_stride);
    std::vector<float> scratch = Scratch(w.matrix());
    GuardedFloats y(n * y_stride);
    std::vector<float> expected = y.vector();
    Linear(x.data(), n, x_stride, w.matrix(), y.data(), y_stride, scratch.data());
    RefLinear(x.data(), n, x_stride, w.matrix(), expected.data(), y_stride);
    ExpectNear(y.span(), expected, w.Scale(x, n));
  }
}

TEST_P(LinearTest, LongRows_GemvAndGemm_MatchReference) {
  for (const int64_t n : {1, 7, 8, 65}) {
    const int64_t out = 37, in = 4099;
    const Weights w(rng_, DType::kBf16, out, in, true);
    const std::vector<float> x = RandomNormal(rng_, n * in);
    std::vector<float> scratch = Scratch(w.matrix());
    GuardedFloats y(n * out), expected(n * out);
    Linear(x.data(), n, in, w.matrix(), y.data(), out, scratch.data());
    RefLinear(x.data(), n, in, w.matrix(), expected.data(), out);
    SCOPED_TRACE(absl::StrCat("n ", n));
    ExpectNear(y.span(), expected.span(), w.Scale(x, n));
  }
}

TEST_P(LinearTest, TokensSplitAtTiles_AnyCount_SameBits) {
  for (int64_t trial = 0; trial < 12; ++trial) {
    const int64_t n = 1 + Below(400), out = 1 + Below(200), in = 1 + Below(600);
    SCOPED_TRACE(absl::StrCat("n ", n, " out ", out, " in ", in));
    const Weights w(rng_, kDTypes[trial % 3], out, in, trial % 2 == 0);
    const std::vector<float> x = RandomNormal(rng_, n * in);
    std::vector<float> scratch = Scratch(w.matrix());
    GuardedFloats whole(n * out), split(n * out);
    Linear(x.data(), n, in, w.matrix(), whole.data(), out, scratch.data());
    for (int64_t begin = 0; begin < n;) {
      const int64_t count = std::min(n - begin, (1 + Below(3)) * kLinearTokenTile);
      Linear(x.data() + begin * in, count, in, w.matrix(), split.data() + begin * out, out,
             scratch.data());
      begin += count;
    }
    EXPECT_TRUE(SameBits(whole.span(), split.span()));
  }
}

TEST_P(LinearTest, OutputsSplitAnywhere_FewTokens_SameBits) {
  for (int64_t n = 1; n < kLinearGemmTokens; ++n) {
    const int64_t out = 2 + Below(90), in = 1 + Below(300), cut = 1 + Below(out - 1);
    SCOPED_TRACE(absl::StrCat("n ", n, " out ", out, " in ", in, " cut ", cut));
    const Weights w(rng_, kDTypes[n % 3], out, in, true);
    const std::vector<float> x = RandomNormal(rng_, n * in);
    std::vector<float> scratch = Scratch(w.matrix());
    GuardedFloats whole(n * out), split(n * out);
    Linear(x.data(), n, in, w.matrix(), whole.data(), out, scratch.data());
    Linear(x.data(), n, in, w.matrix().Rows(0, cut), split.data(), out, scratch.data());
    Linear(x.data(), n, in, w.matrix().Rows(cut, out), split.data() + cut, out, scratch.data());
    EXPECT_TRUE(SameBits(whole.span(), split.span()));
  }
}

TEST_P(LinearTest, NoTokens_AnyPointer_WritesNothing) {
  const Weights w(rng_, DType::kF32, 3, 5, true);
  GuardedFloats y(3);
  Linear(nullptr, 0, 5, w.matrix(), y.data(), 3, nullptr);
  EXPECT_TRUE(y.Untouched(0));
}

TEST_P(LinearTest, OuterProducts_RandomShapes_AddToWhatWasThere) {
  for (int64_t trial = 0; trial < 40; ++trial) {
    const int64_t rows = Below(trial % 4 == 0 ? 600 : 20), m = Below(70), n = Below(70);
    SCOPED_TRACE(absl::StrCat("rows ", rows, " m ", m, " n ", n));
    const std::vector<float> a = RandomNormal(rng_, rows * m), b = RandomNormal(rng_, rows * n);
    std::vector<float> expected = RandomNormal(rng_, m * n);
    GuardedFloats sums(m * n);
    std::copy(expected.begin(), expected.end(), sums.data());
    const double scale = Norm(a) * Norm(b) + Norm(expected);
    AddOuterProducts(a.data(), m, b.data(), n, rows, sums.data());
    RefAddOuterProducts(a.data(), m, b.data(), n, rows, expected.data());
    ExpectNear(sums.span(), expected, scale);
  }
}

}  // namespace
}  // namespace carrel::kernels
