// The reference outputs of the demo model (Hugging Face transformers, fp32): stored rows and
// logits.
#include <cmath>

#include "carrel/v1/context.pb.h"
#include "common/test_util.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/storage/store.h"
#include "model/safetensors.h"
#include "tests/world.h"

namespace carrel {
namespace {

using testing_world::DemoCheckpoint;

std::vector<float> Floats(const model::Safetensors& file, const std::string& name) {
  const model::TensorView view = *file.Get(name);
  std::vector<float> values(static_cast<size_t>(view.elements()));
  WidenToFloat(view.dtype, view.bytes.data(), view.elements(), values.data());
  return values;
}

class GoldenTest : public testing::Test {
 protected:
  void SetUp() override {
    if (testing_world::SharedFolder().empty())
      GTEST_SKIP() << "no shared folder with goldens (CARREL_SHARED)";
    auto golden = model::Safetensors::OpenFile(testing_world::SharedFolder() +
                                               "/demo/golden/registry-512.safetensors");
    CARREL_ASSERT_OK(golden);
    golden_ = std::make_unique<model::Safetensors>(*std::move(golden));
    const model::TensorView ids = *golden_->Get("input_ids");
    tokens_.resize(static_cast<size_t>(ids.elements()));
    std::memcpy(tokens_.data(), ids.bytes.data(), ids.bytes.size());
    folder_ = FreshTempDir();
  }
  std::unique_ptr<model::Safetensors> golden_;
  std::vector<TokenId> tokens_;
  std::string folder_;
};

TEST_F(GoldenTest, Registry512_TokenizesToTheGoldensIds) {
  EXPECT_EQ(*testing_world::DocumentTokens("registry-512"), tokens_);
}

TEST_F(GoldenTest, StoredRows_AreTheGoldensWithinBf16Rounding) {
  CARREL_ASSERT_OK(testing_world::PrefillContext(folder_, "doc", tokens_, kvstore::IndexParams()));
  const auto store = kvstore::Store::Open(folder_, kvstore::StoreMode::kReadOnly);
  CARREL_ASSERT_OK(store);
  const auto stored = (*store)->OpenContext("doc");
  CARREL_ASSERT_OK(stored);
  const AttentionShape shape = DemoCheckpoint().config.shape;
  for (Layer layer(0); layer.value() < shape.layers; layer = layer.next()) {
    for (const bool keys : {true, false}) {
      const std::vector<float> golden =
          Floats(*golden_, absl::StrCat(keys ? "k." : "v.", layer.value()));
      for (KvHead head(0); head.value() < shape.kv_heads; head = head.next()) {
        const auto rows = keys ? kvstore::Rows::OpenKeys(**stored, layer, head)
                               : kvstore::Rows::OpenValues(**stored, layer, head);
        CARREL_ASSERT_OK(rows);
        CARREL_ASSERT_OK(rows->Verify({0, rows->count()}));
        const int64_t floats = rows->count() * shape.head_dim;
        std::vector<float> values(static_cast<size_t>(floats));
        WidenToFloat(DType::kBf16, rows->Address(0), floats, values.data());
        for (int64_t i = 0; i < floats; ++i) {
          const float wanted = golden[head.value() * floats + i];
          // Half a unit in the last place of bf16, and what fp32 arithmetic in another order, or
          // products of split bf16 (decision 046), may add: 6e-6 of a row's largest numbers.
          ASSERT_NEAR(values[i], wanted, std::fabs(wanted) * 0x1.02p-8 + 2e-4)
              << (keys ? "k." : "v.") << layer << " head " << head << " element " << i;
        }
      }
    }
  }
}

// The document as a prompt after a context of `context_tokens`: all the rest is attended in the
// window, exactly.
void ExpectGoldenLogits(const std::string& folder, const std::vector<TokenId>& tokens,
                        int64_t context_tokens, const std::vector<float>& golden,
                        double tolerance) {
  absl::StatusOr<std::unique_ptr<testing_world::EmbeddedDecoder>> decoder;
  if (context_tokens == 0) {
    decoder = testing_world::EmbeddedDecoder::ModelOnly();
  } else {
    CARREL_ASSERT_OK(testing_world::PrefillContext(
        folder, "doc", {tokens.begin(), tokens.begin() + context_tokens}, kvstore::IndexParams()));
    decoder::RetrievalConfig config;
    config.selection = select::All();
    decoder = testing_world::EmbeddedDecoder::Open(folder, "doc", config);
  }
  CARREL_ASSERT_OK(decoder);
  decoder::GenerateOptions options;
  options.max_tokens = 0;
  options.keep_logits = true;
  const auto result =
      (**decoder)->Generate({tokens.begin() + context_tokens, tokens.end()}, options);
  CARREL_ASSERT_OK(result);
  const int64_t vocab = DemoCheckpoint().config.vocab_size;
  const int64_t positions = static_cast<int64_t>(tokens.size()) - context_tokens;
  ASSERT_EQ(static_cast<int64_t>(result->logits.size()), positions * vocab);
  double worst = 0;
  for (int64_t i = 0; i < positions; ++i) {
    worst = std::max(
        worst,
        RelativeError(absl::MakeConstSpan(result->logits).subspan(i * vocab, vocab),
                      absl::MakeConstSpan(golden).subspan((context_tokens + i) * vocab, vocab)));
  }
  std::cout << "context of " << context_tokens << ": worst relative error of " << positions
            << " positions " << worst << std::endl;
  EXPECT_LE(worst, tolerance);
}

TEST_F(GoldenTest, LogitsOfEveryPosition_AreTheGoldens) {
  ExpectGoldenLogits(folder_, tokens_, 0, Floats(*golden_, "logits_all"), 1e-3);
}

// Stored rows are rounded to bf16, and it shows: most of all in the first one, to which every head
// attends much.
TEST_F(GoldenTest, LogitsAfterOneToken_AreTheGoldensUpToStoredRounding) {
  ExpectGoldenLogits(folder_, tokens_, 1, Floats(*golden_, "logits_all"), 1e-2);
}
TEST_F(GoldenTest, LogitsAfterHalf_AreTheGoldensUpToStoredRounding) {
  ExpectGoldenLogits(folder_, tokens_, 227, Floats(*golden_, "logits_all"), 1e-2);
}

}  // namespace
}  // namespace carrel
