// Real checkpoints against what transformers computes from them (shared/README.md).
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/test_util.h"
#include "model/test_models.h"

namespace carrel::model {
namespace {

constexpr double kLogitsTolerance = 1e-4;  // the requirement is 1e-3
constexpr double kKvTolerance = 1e-4;

template <typename T>
std::vector<T> Values(const Safetensors& file, const std::string& name) {
  const absl::StatusOr<TensorView> view = file.Get(name);
  EXPECT_TRUE(view.ok()) << view.status();
  if (!view.ok()) return {};
  std::vector<T> values(view->bytes.size() / sizeof(T));
  std::memcpy(values.data(), view->bytes.data(), view->bytes.size());
  return values;
}

double WorstRow(absl::Span<const float> out, absl::Span<const float> ref, int64_t width) {
  if (out.size() != ref.size()) return INFINITY;
  double worst = 0;
  for (size_t begin = 0; begin < out.size(); begin += width) {
    worst = std::max(worst, RelativeError(out.subspan(begin, width), ref.subspan(begin, width)));
  }
  return worst;
}

// Logits of every position, K and V of every layer.
void ExpectGolden(const TestModel& model, const Safetensors& golden, bool reference_attention) {
  const auto tokens = Values<int32_t>(golden, "input_ids");
  const int64_t n = static_cast<int64_t>(tokens.size());
  ASSERT_GT(n, 0);
  DenseAttention attention(model.config.shape, n, reference_attention);
  ThreadPool pool(1);
  const auto logits = Forward(model, tokens, 0, n, &pool, attention);
  CARREL_ASSERT_OK(logits);
  const double worst =
      WorstRow(*logits, Values<float>(golden, "logits_all"), model.config.vocab_size);
  EXPECT_LE(worst, kLogitsTolerance);
  double worst_k = 0, worst_v = 0;
  for (int32_t layer = 0; layer < model.config.shape.layers; ++layer) {
    const int64_t dim = model.config.shape.head_dim;
    const auto k = Values<float>(golden, absl::StrCat("k.", layer));
    const auto v = Values<float>(golden, absl::StrCat("v.", layer));
    worst_k = std::max(worst_k, WorstRow(attention.K(layer, n), k, dim));
    worst_v = std::max(worst_v, WorstRow(attention.V(layer, n), v, dim));
  }
  EXPECT_LE(worst_k, kKvTolerance);
  EXPECT_LE(worst_v, kKvTolerance);
  std::cout << "worst relative error: logits " << worst << ", K " << worst_k << ", V " << worst_v
            << std::endl;
}

class GoldenTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const auto shared = SharedDir();
    if (!shared) GTEST_SKIP() << "no shared folder (CARREL_SHARED): golden checkpoints not checked";
    const std::string folder = *shared + "/golden-models/" + GetParam();
    auto model = TestModel::Load(folder);
    CARREL_ASSERT_OK(model);
    model_ = *std::move(model);
    auto golden = Safetensors::OpenFile(folder + "/golden.safetensors");
    CARREL_ASSERT_OK(golden);
    golden_.emplace(*std::move(golden));
  }

  TestModel model_;
  std::optional<Safetensors> golden_;
};

TEST_P(GoldenTest, WholeSequence_LogitsAndKvEqualTransformers) {
  ExpectGolden(model_, *golden_, /*reference_attention=*/true);
}

TEST_P(GoldenTest, GreedyContinuation_EqualsTransformers) {
  const auto tokens = Values<int32_t>(*golden_, "input_ids");
  const auto expected = Values<int32_t>(*golden_, "greedy");
  ASSERT_EQ(expected.size(), 16u);
  Position position = static_cast<Position>(tokens.size());
  DenseAttention attention(model_.config.shape, position + 16, /*reference=*/false);
  ThreadPool pool(1);
  auto logits = Forward(model_, tokens, 0, position, &pool, attention, /*last_only=*/true);
  std::vector<TokenId> generated;
  for (size_t step = 0; step < expected.size(); ++step) {
    CARREL_ASSERT_OK(logits);
    generated.push_back(ArgMax(*logits));
    logits = Forward(model_, {generated.back()}, position++, 1, &pool, attention);
  }
  EXPECT_EQ(generated, expected);
}

TEST_P(GoldenTest, AnyThreads_SameBits) {
  const auto once = Values<int32_t>(*golden_, "input_ids");
  std::vector<TokenId> tokens = once;  // long enough for several blocks of work
  tokens.insert(tokens.end(), once.begin(), once.begin() + 130);
  const int64_t n = static_cast<int64_t>(tokens.size());
  for (int64_t block : {n, int64_t{33}, int64_t{5}}) {
    DenseAttention attention(model_.config.shape, n, false);
    const auto expected = Forward(model_, tokens, 0, block, nullptr, attention);
    CARREL_ASSERT_OK(expected);
    for (int threads : {0, 1, 2}) {
      ThreadPool pool(threads);
      DenseAttention same(model_.config.shape, n, false);
      const auto logits = Forward(model_, tokens, 0, block, &pool, same);
      CARREL_ASSERT_OK(logits);
      EXPECT_TRUE(*logits == *expected) << threads + 1 << " threads, blocks of " << block;
    }
  }
}

TEST_P(GoldenTest, TokenByToken_EqualsBlock) {
  const auto tokens = Values<int32_t>(*golden_, "input_ids");
  const int64_t n = static_cast<int64_t>(tokens.size());
  DenseAttention whole(model_.config.shape, n, false), single(model_.config.shape, n, false);
  const auto expected = Forward(model_, tokens, 0, n, nullptr, whole);
  const auto logits = Forward(model_, tokens, 0, 1, nullptr, single);
  CARREL_ASSERT_OK(expected);
  CARREL_ASSERT_OK(logits);
  EXPECT_LE(WorstRow(*logits, *expected, model_.config.vocab_size), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, GoldenTest,
                         testing::Values("llama3.1", "llama2-mha-linear", "mistral", "qwen2",
                                         "qwen3"),
                         [](const testing::TestParamInfo<const char*>& info) {
                           std::string name = info.param;
                           std::erase_if(name, [](char c) { return c == '.' || c == '-'; });
                           return name;
                         });

class DemoModelTest : public testing::Test {
 protected:
  void SetUp() override {
    auto model = TestModel::Load(DemoModelDir());
    CARREL_ASSERT_OK(model);
    model_ = *std::move(model);
  }
  absl::StatusOr<Safetensors> Golden(const std::string& name) {
    return Safetensors::OpenFile(*SharedDir() + "/demo/golden/" + name);
  }
  TestModel model_;
};

TEST_F(DemoModelTest, Registry512_LogitsAndKvEqualTransformers) {
  if (!SharedDir()) GTEST_SKIP() << "no shared folder (CARREL_SHARED): golden not checked";
  const auto golden = Golden("registry-512.safetensors");
  CARREL_ASSERT_OK(golden);
  ExpectGolden(model_, *golden, /*reference_attention=*/false);
}

TEST_F(DemoModelTest, Registry2k_LastLogitsEqualTransformers) {
  if (!SharedDir()) GTEST_SKIP() << "no shared folder (CARREL_SHARED): golden not checked";
  const auto golden = Golden("registry-2k.safetensors");
  CARREL_ASSERT_OK(golden);
  const auto tokens = Values<int32_t>(*golden, "input_ids");
  const int64_t n = static_cast<int64_t>(tokens.size());
  DenseAttention attention(model_.config.shape, n, false);
  ThreadPool pool(1);
  const auto logits = Forward(model_, tokens, 0, n, &pool, attention, /*last_only=*/true);
  CARREL_ASSERT_OK(logits);
  const double error = RelativeError(*logits, Values<float>(*golden, "logits_last"));
  EXPECT_LE(error, kLogitsTolerance);
  std::cout << "relative error of the last logits: " << error << std::endl;
}

// The first tokens of registry-512 and the argmax of the golden logits after each of them: what
// needs no shared folder. (Ties within 1e-2 would be left out; there are none.)
const std::vector<TokenId> kOpening = {0,   267, 748, 809, 925,  778, 261, 1024, 440,  16,
                                       267, 418, 981, 610, 261,  970, 456, 16,   267,  440,
                                       689, 261, 583, 535, 653,  261, 816, 16,   267,  328,
                                       326, 274, 421, 818, 1201, 357, 753, 298,  1501, 285};
const std::vector<TokenId> kOpeningArgMax = {267, 328, 376, 925,  778, 261, 1024, 440,  16,  267,
                                             405, 376, 465, 261,  970, 456, 16,   267,  328, 427,
                                             261, 405, 809, 653,  261, 816, 16,   267,  405, 326,
                                             274, 390, 818, 1201, 459, 753, 298,  1501, 285, 223};

TEST_F(DemoModelTest, OpeningOfRegistry512_PredictsTheTokensOfTransformers) {
  const int64_t n = static_cast<int64_t>(kOpening.size());
  DenseAttention attention(model_.config.shape, n, true);
  const auto logits = Forward(model_, kOpening, 0, n, nullptr, attention);
  CARREL_ASSERT_OK(logits);
  std::vector<TokenId> predicted;
  for (int64_t i = 0; i < n; ++i) {
    predicted.push_back(ArgMax(absl::MakeConstSpan(*logits).subspan(i * model_.config.vocab_size,
                                                                    model_.config.vocab_size)));
  }
  EXPECT_EQ(predicted, kOpeningArgMax);
}

TEST_F(DemoModelTest, AnyThreads_SameBits) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < 13; ++i) tokens.insert(tokens.end(), kOpening.begin(), kOpening.end());
  const int64_t n = static_cast<int64_t>(tokens.size());
  for (int64_t block : {n, int64_t{20}, int64_t{3}}) {
    const int64_t count = block == n ? n : 20 * block;
    const absl::Span<const TokenId> some = absl::MakeConstSpan(tokens).subspan(0, count);
    DenseAttention attention(model_.config.shape, n, false);
    const auto expected = Forward(model_, some, 0, block, nullptr, attention);
    CARREL_ASSERT_OK(expected);
    for (int threads : {1, 2}) {
      ThreadPool pool(threads);
      DenseAttention same(model_.config.shape, n, false);
      const auto logits = Forward(model_, some, 0, block, &pool, same);
      CARREL_ASSERT_OK(logits);
      EXPECT_TRUE(*logits == *expected) << threads + 1 << " threads, blocks of " << block;
    }
  }
}

TEST_F(DemoModelTest, TokenByToken_EqualsBlock) {
  const int64_t n = static_cast<int64_t>(kOpening.size());
  DenseAttention whole(model_.config.shape, n, false), single(model_.config.shape, n, false);
  const auto expected = Forward(model_, kOpening, 0, n, nullptr, whole);
  const auto logits = Forward(model_, kOpening, 0, 1, nullptr, single);
  CARREL_ASSERT_OK(expected);
  CARREL_ASSERT_OK(logits);
  EXPECT_LE(WorstRow(*logits, *expected, model_.config.vocab_size), 1e-5);
}

}  // namespace
}  // namespace carrel::model
