#include "model/transformer.h"

#include <memory>
#include <random>
#include <vector>

#include "common/status.h"
#include "common/test_util.h"
#include "model/test_models.h"

namespace carrel::model {
namespace {

// Each block attends to what its sequence holds.
class EachItsOwn final : public SequencesAttention {
 public:
  explicit EachItsOwn(const std::vector<std::unique_ptr<DenseAttention>>& attentions)
      : attentions_(attentions) {}
  absl::Status Attend(absl::Span<const AttentionInput> inputs, float* attended) override {
    for (size_t i = 0; i < inputs.size(); ++i) {
      RETURN_IF_ERROR(attentions_[i]->Attend(inputs[i], attended + (inputs[i].q - inputs[0].q)));
    }
    return absl::OkStatus();
  }

 private:
  const std::vector<std::unique_ptr<DenseAttention>>& attentions_;
};

// Sequences of any length, and blocks of any size as long as they are few enough together.
TEST(TransformerTest, SequencesTogether_HaveTheBitsThatEachHasAlone) {
  std::mt19937_64 rng(TestSeed());
  const auto model = TestModel::Load(DemoModelDir());
  CARREL_ASSERT_OK(model);
  const ModelConfig& config = model->config;
  ThreadPool pool(2);
  const auto backend = MakeCpuBackend(config, model->weights, &pool);
  ASSERT_EQ(backend->tokens_alike(), 7);
  Transformer transformer(backend.get());
  for (int trial = 0; trial < 8; ++trial) {
    std::vector<std::unique_ptr<DenseAttention>> alone, together;
    std::vector<TokenBlock> blocks;
    std::vector<float> expected, hidden;
    int64_t room = backend->tokens_alike();
    while (room > 0) {
      const int64_t before = 1 + static_cast<int64_t>(rng() % 40);
      const int64_t n = 1 + static_cast<int64_t>(rng() % std::min<int64_t>(3, room));
      room -= n;
      std::vector<float> context = RandomNormal(rng, before * config.hidden_size);
      for (auto* attentions : {&alone, &together}) {
        attentions->push_back(std::make_unique<DenseAttention>(config.shape, before + n, false));
        std::vector<float> copy = context;
        CARREL_ASSERT_OK(
            transformer.ForwardLayer(Layer(2), before, 0, copy.data(), *attentions->back()));
      }
      std::vector<float> block = RandomNormal(rng, n * config.hidden_size);
      hidden.insert(hidden.end(), block.begin(), block.end());
      CARREL_ASSERT_OK(transformer.ForwardLayer(Layer(2), n, before, block.data(), *alone.back()));
      expected.insert(expected.end(), block.begin(), block.end());
      blocks.push_back({before, n});
    }
    EachItsOwn attention(together);
    CARREL_ASSERT_OK(transformer.ForwardLayer(Layer(2), blocks, hidden.data(), attention));
    EXPECT_TRUE(hidden == expected) << blocks.size() << " sequences";
  }
}

}  // namespace
}  // namespace carrel::model
