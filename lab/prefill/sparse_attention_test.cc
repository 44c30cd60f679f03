#include "prefill/sparse_attention.h"

#include "common/dtype.h"
#include "common/test_util.h"
#include "kernels/layer/rope/rope.h"
#include "model/config.h"
#include "prefill/dense_attention.h"

namespace carrel::prefill {
namespace {

constexpr AttentionShape kShape{4, 4, 2, 16};

class SparseAttentionTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    config_ = *ParseAttention(GetParam());
    rope_.theta = 10000;
    inv_freq_ = model::RopeInvFreq(rope_, 16);
  }
  void Fill(int64_t tokens) {
    tokens_ = tokens;
    q_ = RandomNormal(rng_, tokens * 64);
    k_ = RandomNormal(rng_, tokens * 32);
    v_ = RandomNormal(rng_, tokens * 32);
  }
  std::vector<float> Run(LayerAttention& attention, Layer layer, int64_t block) {
    std::vector<float> attended(q_.size());
    for (int64_t at = 0; at < tokens_; at += block) {
      model::AttentionInput input;
      input.layer = layer;
      input.first_position = at;
      input.n = std::min(block, tokens_ - at);
      input.q = &q_[static_cast<size_t>(at * 64)];
      input.k = &k_[static_cast<size_t>(at * 32)];
      input.v = &v_[static_cast<size_t>(at * 32)];
      CARREL_EXPECT_OK(attention.Attend(input, &attended[static_cast<size_t>(at * 64)]));
    }
    return attended;
  }
  std::vector<float> Sparse(Layer layer, int64_t block, int threads) {
    ThreadPool pool(threads);
    const auto attention =
        MakeSparseAttention(config_, kShape, tokens_, {0}, {}, inv_freq_, 4096, &pool);
    return Run(*attention, layer, block);
  }

  std::mt19937_64 rng_{TestSeed()};
  AttentionConfig config_;
  model::RopeConfig rope_;
  std::vector<float> inv_freq_, q_, k_, v_;
  int64_t tokens_ = 0;
};
INSTANTIATE_TEST_SUITE_P(
    Methods, SparseAttentionTest,
    testing::Values("hip:rows=64,sink=8,window=32,block_q=32",
                    "infinitehip:rows=64,sink=8,window=32,block_q=32"),
    [](const auto& info) {
      return std::string(info.param).substr(0, std::string(info.param).find(':'));
    });

// A budget for every row: dense attention, whether keys keep their positions or are given the same
// ones again.
TEST_P(SparseAttentionTest, RowsForAll_IsDenseAttention) {
  config_.rows = 1000;
  Fill(777);
  ThreadPool pool(1);
  DenseAttention dense(kShape, tokens_, {0}, {}, &pool);
  EXPECT_LE(RelativeError(Sparse(Layer(1), 512, 1), Run(dense, Layer(1), 512)), 1e-5);
  config_.rope = model::Rope::kInfiniteHip;
  const std::vector<float> moved = Sparse(Layer(1), 512, 1);
  kernels::RefRope(q_.data(), tokens_, 4, 16, 0, inv_freq_.data());
  kernels::RefRope(k_.data(), tokens_, 2, 16, 0, inv_freq_.data());
  DenseAttention rotated(kShape, tokens_, {0}, {}, &pool);
  EXPECT_LE(RelativeError(moved, Run(rotated, Layer(1), 512)), 1e-4);
}

TEST_P(SparseAttentionTest, Bits_DependNeitherOnThePoolNorOnHowTheDocumentIsPassed) {
  Fill(1500);
  for (const model::Rope rope : {model::Rope::kTrained, model::Rope::kInfiniteHip}) {
    config_.rope = rope;
    for (const Layer layer : {Layer(0), Layer(3)}) {
      const std::vector<float> expected = Sparse(layer, 512, 0);
      EXPECT_EQ(Sparse(layer, 64, 2), expected);
      EXPECT_EQ(Sparse(layer, 1500, 1), expected);
    }
  }
}

// A stretch of keys that every query wants is found wherever it lies, and fills the output.
TEST_P(SparseAttentionTest, AStretchThatIsWanted_IsAttended) {
  for (const model::Rope rope : {model::Rope::kTrained, model::Rope::kInfiniteHip}) {
    config_.rope = rope;
    Fill(2000);
    // Nothing turns in the first channel pair of slow frequencies: there they agree anywhere.
    const int64_t begin = 100 + static_cast<int64_t>(rng_() % 1500);
    for (int64_t i = 0; i < tokens_ * 4; ++i) q_[static_cast<size_t>(i * 16 + 7)] = 6;
    for (int64_t j = begin; j < begin + 64; ++j) {
      for (int64_t h = 0; h < 2; ++h) {
        const auto at = static_cast<size_t>((j * 2 + h) * 16);
        k_[at + 7] = 12;
        for (size_t c = 0; c < 16; ++c) v_[at + c] = 5;
      }
    }
    const std::vector<float> out = Sparse(Layer(3), 500, 1);
    for (size_t c = 0; c < 64; ++c) {
      EXPECT_NEAR(out[static_cast<size_t>(1999 * 64) + c], 5, 0.2) << "from " << begin;
    }
  }
}

TEST(LayerAttentionTest, UndoRope_HandsOutWhatWasBeforeRope) {
  std::mt19937_64 rng(TestSeed());
  model::RopeConfig rope;
  const std::vector<float> inv_freq = model::RopeInvFreq(rope, 16);
  constexpr int64_t kTokens = 900;
  std::vector<float> q = RandomNormal(rng, kTokens * 64), k = RandomNormal(rng, kTokens * 32);
  const std::vector<float> raw_q = q, raw_k = k, v = RandomNormal(rng, kTokens * 32);
  kernels::RefRope(q.data(), kTokens, 4, 16, 0, inv_freq.data());
  kernels::RefRope(k.data(), kTokens, 2, 16, 0, inv_freq.data());
  ThreadPool pool(1);
  DenseAttention attention(kShape, kTokens, {3, 850}, inv_freq, &pool);
  std::vector<float> attended(q.size());
  model::AttentionInput input;
  input.n = kTokens;
  input.q = q.data();
  input.k = k.data();
  input.v = v.data();
  CARREL_ASSERT_OK(attention.Attend(input, attended.data()));
  const LayerRows rows = attention.TakeLayer(Layer(0));
  for (int64_t h = 0; h < 2; ++h) {
    std::vector<float> stored(kTokens * 16), expected, queries;
    WidenToFloat(DType::kBf16, rows.k[static_cast<size_t>(h)].data(), kTokens * 16, stored.data());
    for (int64_t j = 0; j < kTokens; ++j) {
      const auto at = raw_k.begin() + (j * 2 + h) * 16;
      expected.insert(expected.end(), at, at + 16);
    }
    EXPECT_LE(RelativeError(stored, expected), 4e-3);  // bf16
    for (const int64_t j : {3, 850}) {
      const auto at = raw_q.begin() + (j * 4 + h * 2) * 16;
      queries.insert(queries.end(), at, at + 32);
    }
    EXPECT_LE(RelativeError(rows.queries[static_cast<size_t>(h)], queries), 1e-5);
  }
}

TEST(AttentionConfigTest, Text_IsReadBack_AndWhatMakesNoSenseIsRefused) {
  for (const char* text : {"dense", "infinitehip:block_q=32,rows=512,sink=4,stride_q=2,window=64",
                           "hip:block_k=4,block_q=64,rows=256,sink=256,stride_q=4,window=1024"}) {
    EXPECT_EQ(AttentionText(*ParseAttention(text)), text);
  }
  EXPECT_THAT(ParseAttention("flash").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "attention=flash is none of dense"));
  EXPECT_THAT(ParseAttention("infinitehip:block_k=2").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "no parameter \"block_k\""));
  EXPECT_THAT(ParseAttention("dense:rows=2").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "it has none"));
  EXPECT_THAT(ParseAttention("hip:rows=x").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "rows=x is not a number"));
  model::ModelConfig model;
  model.max_position_embeddings = 2048;
  const auto validate = [&](const char* text, model::Rope rope, KeyPosition position) {
    AttentionConfig config = *ParseAttention(text);
    config.rope = rope;
    config.key_position = position;
    return ValidateAttention(config, model);
  };
  const auto bad = absl::StatusCode::kInvalidArgument;
  constexpr model::Rope kMoved = model::Rope::kInfiniteHip, kTrained = model::Rope::kTrained;
  EXPECT_THAT(validate("infinitehip", kMoved, KeyPosition::kAfterRope),
              StatusIs(bad, "needs key_position=none"));
  EXPECT_THAT(validate("dense", kMoved, KeyPosition::kNone), StatusIs(bad, "not dense"));
  EXPECT_THAT(validate("infinitehip", kMoved, KeyPosition::kNone), StatusIs(bad, "3392 positions"));
  CARREL_EXPECT_OK(validate("infinitehip:rows=512", kMoved, KeyPosition::kNone));
  CARREL_EXPECT_OK(validate("infinitehip", kTrained, KeyPosition::kNone));
  EXPECT_THAT(validate("hip:rows=8", kTrained, KeyPosition::kNone), StatusIs(bad, "rows=8"));
  EXPECT_THAT(validate("hip:block_q=48", kTrained, KeyPosition::kNone),
              StatusIs(bad, "block_q=48"));
}

}  // namespace
}  // namespace carrel::prefill
