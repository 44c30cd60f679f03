#include "model/cpu_backend.h"

#include <cstring>
#include <string>
#include <vector>

#include "common/file.h"
#include "common/test_util.h"
#include "model/test_models.h"

namespace carrel::model {
namespace {

std::vector<TokenId> RandomTokens(std::mt19937_64& rng, int64_t count, int64_t vocab_size) {
  std::vector<TokenId> tokens(static_cast<size_t>(count));
  for (TokenId& token : tokens) token = static_cast<TokenId>(rng() % vocab_size);
  return tokens;
}

// Every option of the forward pass, against plain loops: also those that no golden checkpoint has.
struct Variant {
  const char* name;
  const char* model_type;
  const char* options;
};

class VariantTest : public testing::TestWithParam<Variant> {};

TEST_P(VariantTest, RandomWeights_LogitsEqualPlainLoops) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 rng(seed);
  const std::string folder = FreshTempDir();
  const std::string config = absl::StrCat(
      "{\"model_type\": \"", GetParam().model_type,
      "\", \"vocab_size\": 61, \"hidden_size\": 24, \"intermediate_size\": 37, "
      "\"num_hidden_layers\": 2, \"num_attention_heads\": 6, \"max_position_embeddings\": 512, ",
      GetParam().options, "}");
  CARREL_ASSERT_OK(WriteRandomModel(folder, config, seed));
  const auto model = TestModel::Load(folder);
  CARREL_ASSERT_OK(model);
  const std::vector<TokenId> tokens = RandomTokens(rng, 21, 61);
  const std::vector<float> expected = ReferenceLogits(*model, tokens);
  for (int64_t block : {1, 6, 10, 21}) {
    DenseAttention attention(model->config.shape, 21, false);
    const auto logits = Forward(*model, tokens, 0, block, nullptr, attention);
    CARREL_ASSERT_OK(logits);
    EXPECT_LE(RelativeError(*logits, expected), 1e-5) << "blocks of " << block;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Options, VariantTest,
    testing::Values(
        Variant{"Mha", "llama", "\"num_key_value_heads\": 6"},
        Variant{"TiedGqa", "llama", "\"num_key_value_heads\": 2, \"tie_word_embeddings\": true"},
        Variant{"OneKvHead", "llama", "\"num_key_value_heads\": 1, \"head_dim\": 10"},
        Variant{"AllBiases", "llama",
                "\"num_key_value_heads\": 3, \"attention_bias\": true, \"mlp_bias\": true"},
        Variant{"Llama3Rope", "llama",
                "\"num_key_value_heads\": 2, \"head_dim\": 16, \"rope_scaling\": {\"rope_type\": "
                "\"llama3\", \"factor\": 8, \"low_freq_factor\": 1, \"high_freq_factor\": 4, "
                "\"original_max_position_embeddings\": 16}"},
        Variant{"LinearRope", "mistral",
                "\"num_key_value_heads\": 2, \"rope_scaling\": {\"type\": \"linear\", \"factor\": "
                "2.5}"},
        Variant{"YarnRope", "qwen3",
                "\"num_key_value_heads\": 2, \"head_dim\": 16, \"rope_scaling\": {\"rope_type\": "
                "\"yarn\", \"factor\": 8, \"original_max_position_embeddings\": 16}"},
        Variant{"Experts", "qwen3_moe",
                "\"num_key_value_heads\": 2, \"head_dim\": 8, \"num_experts\": 7, "
                "\"num_experts_per_tok\": 3, \"moe_intermediate_size\": 11, "
                "\"norm_topk_prob\": true"},
        Variant{"ExpertsInEverySecondLayer", "qwen3_moe",
                "\"num_key_value_heads\": 2, \"head_dim\": 8, \"num_experts\": 4, "
                "\"num_experts_per_tok\": 4, \"moe_intermediate_size\": 40, "
                "\"decoder_sparse_step\": 2"},
        Variant{"QkvBias", "qwen2", "\"num_key_value_heads\": 2"},
        Variant{"QkNormAndBias", "qwen3",
                "\"num_key_value_heads\": 2, \"head_dim\": 8, \"attention_bias\": true"}),
    [](const testing::TestParamInfo<Variant>& info) { return info.param.name; });

class CpuBackendTest : public testing::Test {
 protected:
  void SetUp() override {
    auto model = TestModel::Load(DemoModelDir());
    CARREL_ASSERT_OK(model);
    model_ = *std::move(model);
    backend_ = MakeCpuBackend(model_.config, model_.weights, nullptr);
  }
  TestModel model_;
  std::unique_ptr<Backend> backend_;
};

TEST_F(CpuBackendTest, Embed_TokenOutsideVocabulary_IsRefusedAndNamed) {
  std::vector<float> hidden(3 * model_.config.hidden_size);
  EXPECT_THAT(backend_->Embed({1, 2, 2048}, hidden.data()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "token id 2048 at index 2 is outside the vocabulary [0, 2048)"));
  EXPECT_THAT(backend_->Embed({-1}, hidden.data()),
              StatusIs(absl::StatusCode::kInvalidArgument, "token id -1 at index 0"));
}

TEST_F(CpuBackendTest, NoTokens_TouchesNothing) {
  CARREL_EXPECT_OK(backend_->Embed({}, nullptr));
  CARREL_EXPECT_OK(backend_->ProjectQkv(Layer(0), nullptr, 0, 0, nullptr, nullptr, nullptr));
  CARREL_EXPECT_OK(backend_->FinishLayer(Layer(0), nullptr, 0, nullptr));
  CARREL_EXPECT_OK(backend_->Logits(nullptr, 0, nullptr));
}

TEST_F(CpuBackendTest, ProjectQuery_IsTheQueryOfProjectQkvBitForBit) {
  std::mt19937_64 rng(TestSeed());
  const AttentionShape& shape = model_.config.shape;
  ThreadPool pool(2);
  const auto threaded = MakeCpuBackend(model_.config, model_.weights, &pool);
  for (int64_t n : {1, 7, 8, 64, 65, 300}) {
    const std::vector<float> hidden = RandomNormal(rng, n * model_.config.hidden_size);
    std::vector<float> q(n * shape.q_heads * shape.head_dim),
        k(n * shape.kv_heads * shape.head_dim);
    std::vector<float> v = k, alone = q;
    for (Backend* backend : {backend_.get(), threaded.get()}) {
      CARREL_ASSERT_OK(
          backend->ProjectQkv(Layer(3), hidden.data(), n, 1000, q.data(), k.data(), v.data()));
      CARREL_ASSERT_OK(backend->ProjectQuery(Layer(3), hidden.data(), n, 1000, alone.data()));
      EXPECT_TRUE(q == alone) << n;
    }
  }
}

// How tokens are cut into blocks depends on the cores.
TEST_F(CpuBackendTest, ManyCores_GiveTheBitsOfOne) {
  std::mt19937_64 rng(TestSeed());
  const AttentionShape& shape = model_.config.shape;
  ThreadPool pool(15);
  const auto threaded = MakeCpuBackend(model_.config, model_.weights, &pool);
  for (const int64_t n : {48, 65, 100, 257, 300, 700, 1544, 1962}) {
    const std::vector<float> entering = RandomNormal(rng, n * model_.config.hidden_size);
    const std::vector<float> attended = RandomNormal(rng, n * shape.q_heads * shape.head_dim);
    struct {
      std::vector<float> q, k, v, hidden;
    } of[2];
    for (int i = 0; i < 2; ++i) {
      Backend& backend = i == 0 ? *backend_ : *threaded;
      of[i].q.resize(n * shape.q_heads * shape.head_dim);
      of[i].k.resize(n * shape.kv_heads * shape.head_dim);
      of[i].v = of[i].k;
      of[i].hidden = entering;
      CARREL_ASSERT_OK(backend.ProjectQkv(Layer(2), entering.data(), n, 7, of[i].q.data(),
                                          of[i].k.data(), of[i].v.data()));
      CARREL_ASSERT_OK(backend.FinishLayer(Layer(2), attended.data(), n, of[i].hidden.data()));
    }
    EXPECT_TRUE(of[0].q == of[1].q && of[0].k == of[1].k && of[0].v == of[1].v) << n;
    EXPECT_TRUE(of[0].hidden == of[1].hidden) << n;
  }
}

// A caller may cut a document into blocks of any multiple of the kernel's tile.
TEST_F(CpuBackendTest, BlocksOfTiles_GiveTheBitsOfTheWhole) {
  std::mt19937_64 rng(TestSeed());
  const std::vector<TokenId> tokens = RandomTokens(rng, 450, model_.config.vocab_size);
  DenseAttention whole(model_.config.shape, 450, false), cut(model_.config.shape, 450, false);
  const auto expected = Forward(model_, tokens, 0, 450, nullptr, whole);
  CARREL_ASSERT_OK(expected);
  const auto logits = Forward(model_, tokens, 0, 128, nullptr, cut);
  CARREL_ASSERT_OK(logits);
  EXPECT_TRUE(*logits == *expected);
}

TEST_F(CpuBackendTest, WidenedCheckpoint_GivesTheSameLogits) {
  std::mt19937_64 rng(TestSeed());
  const std::string folder = FreshTempDir();
  std::vector<std::vector<float>> storage;
  std::vector<NamedTensor> tensors;
  const auto file = Safetensors::OpenModel(DemoModelDir());
  CARREL_ASSERT_OK(file);
  for (const auto& [name, view] : file->tensors()) {
    std::vector<float>& values = storage.emplace_back(view.elements());
    WidenToFloat(view.dtype, view.bytes.data(), view.elements(), values.data());
    tensors.push_back({name,
                       {DType::kF32, view.shape,
                        absl::string_view(reinterpret_cast<const char*>(values.data()),
                                          values.size() * sizeof(float))}});
  }
  CARREL_ASSERT_OK(WriteSafetensors(folder + "/model.safetensors", tensors));
  TestModel wide = model_;
  const auto weights = LoadWeights(folder, model_.config);
  CARREL_ASSERT_OK(weights);
  wide.weights = *weights;
  const std::vector<TokenId> tokens = RandomTokens(rng, 80, model_.config.vocab_size);
  for (int64_t block : {3, 80}) {
    DenseAttention a(model_.config.shape, 80, false), b(model_.config.shape, 80, false);
    const auto expected = Forward(model_, tokens, 0, block, nullptr, a);
    const auto logits = Forward(wide, tokens, 0, block, nullptr, b);
    CARREL_ASSERT_OK(expected);
    CARREL_ASSERT_OK(logits);
    EXPECT_LE(RelativeError(*logits, *expected), 1e-5) << block;
  }
}

// The format aligns nothing: a header of odd length puts every bf16 weight at an odd address.
TEST_F(CpuBackendTest, UnalignedCheckpoint_GivesTheSameBits) {
  std::mt19937_64 rng(TestSeed());
  const std::string folder = FreshTempDir();
  const auto bytes = ReadFile(DemoModelDir() + "/model.safetensors");
  CARREL_ASSERT_OK(bytes);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes->data(), sizeof(header_bytes));
  const uint64_t odd_bytes = (header_bytes | 1) + 2 * (header_bytes & 1);
  std::string moved(reinterpret_cast<const char*>(&odd_bytes), sizeof(odd_bytes));
  moved += bytes->substr(8, header_bytes) + std::string(odd_bytes - header_bytes, ' ') +
           bytes->substr(8 + header_bytes);
  CARREL_ASSERT_OK(WriteFileAtomically(folder + "/model.safetensors", moved));
  TestModel unaligned = model_;
  const auto weights = LoadWeights(folder, model_.config);
  CARREL_ASSERT_OK(weights);
  unaligned.weights = *weights;
  const std::vector<TokenId> tokens = RandomTokens(rng, 70, model_.config.vocab_size);
  for (int64_t block : {2, 70}) {
    DenseAttention a(model_.config.shape, 70, false), b(model_.config.shape, 70, false);
    const auto expected = Forward(model_, tokens, 0, block, nullptr, a);
    const auto logits = Forward(unaligned, tokens, 0, block, nullptr, b);
    CARREL_ASSERT_OK(expected);
    CARREL_ASSERT_OK(logits);
    EXPECT_TRUE(*logits == *expected) << block;
  }
}

class FailingAttention : public Attention {
 public:
  absl::Status Attend(const AttentionInput&, float*) override {
    return absl::UnavailableError("the store is gone");
  }
};

TEST_F(CpuBackendTest, AttentionFails_LayerFailsAndHiddenStays) {
  std::vector<float> hidden(model_.config.hidden_size, 0.5f);
  Transformer transformer(backend_.get());
  FailingAttention attention;
  EXPECT_THAT(transformer.ForwardLayer(Layer(0), 1, 0, hidden.data(), attention),
              StatusIs(absl::StatusCode::kUnavailable, "the store is gone"));
  EXPECT_EQ(hidden, std::vector<float>(model_.config.hidden_size, 0.5f));
}

}  // namespace
}  // namespace carrel::model
