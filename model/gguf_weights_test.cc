#include "model/gguf_weights.h"

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "common/status.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/fingerprint.h"
#include "model/gguf_test_model.h"
#include "model/non_finite.h"
#include "model/test_models.h"
#include "model/weights.h"

namespace carrel::model {
namespace {

using kernels::GgufType;
using Code = absl::StatusCode;

constexpr TokenId kTokens[] = {1, 95, 3, 40, 41, 7, 7, 60, 12, 88, 5, 31};

std::vector<float> Logits(const TestModel& model) {
  DenseAttention attention(model.config.shape, 64, /*reference=*/false);
  auto logits = Forward(model, kTokens, 0, 5, nullptr, attention);
  EXPECT_TRUE(logits.ok()) << logits.status();
  return logits.ok() ? *std::move(logits) : std::vector<float>();
}

absl::StatusOr<TestModel> LoadWidened(const std::string& path) {
  TestModel model;
  ASSIGN_OR_RETURN(model.config, LoadModelConfig(path));
  ASSIGN_OR_RETURN(std::shared_ptr<const Gguf> gguf, Gguf::Open(path));
  ASSIGN_OR_RETURN(model.weights, LoadGgufWeights(gguf, model.config, nullptr, GgufBlocks::kWiden));
  return model;
}

// The file's logits are those of the folder with the same weights: widened to bf16, and, but for
// the rounding of products with blocks, as they lie.
void ExpectSameLogits(const GgufTestModel& model) {
  const std::string path = WriteGguf(MakeGguf(model).Bytes());  // in this test's folder
  const std::string folder = path + ".folder";
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    SCOPED_TRACE(DTypeName(dtype));
    std::filesystem::create_directories(folder);
    CARREL_ASSERT_OK(WriteSameModel(model, dtype, folder));
    const auto want = TestModel::Load(folder);
    const auto got = dtype == DType::kBf16 ? LoadWidened(path) : TestModel::Load(path);
    CARREL_ASSERT_OK(want);
    CARREL_ASSERT_OK(got);
    EXPECT_LE(RelativeError(Logits(*got), Logits(*want)), dtype == DType::kBf16 ? 1e-6 : 1e-3);
  }
}

TEST(GgufWeightsTest, EveryArchitecture_GivesTheFoldersLogits) {
  for (const char* architecture : {"llama", "qwen2", "qwen3"}) {
    for (const bool biases : {false, true}) {
      SCOPED_TRACE(testing::Message() << architecture << " biases " << biases);
      if (biases && std::string(architecture) != "llama") continue;
      ExpectSameLogits({.architecture = architecture,
                        .types = {{"attn", GgufType::kQ4_K}, {"ffn", GgufType::kQ6_K}},
                        .biases = biases,
                        .tied = !biases,
                        .seed = TestSeed()});
    }
  }
}

TEST(GgufWeightsTest, EveryType_GivesTheFoldersLogits) {
  for (uint32_t number = 0; number < 64; ++number) {
    const auto type = kernels::ParseGgufType(number);
    if (!type) continue;
    SCOPED_TRACE(kernels::TraitsOf(*type).name);
    ExpectSameLogits({.types = {{"attn", *type}, {"ffn", *type}, {"token", *type}},
                      .biases = true,
                      .seed = TestSeed()});
  }
}

TEST(GgufWeightsTest, BiasThatBf16CannotHold_IsKept) {
  GgufTestModel model{.architecture = "qwen2", .types = {{"attn_q", GgufType::kQ8_0}}};
  GgufWriter writer = MakeGguf(model);
  std::vector<float> bias(128, 0.1f);  // 0.1 in f32 is not a bf16
  writer.DropTensor("blk.0.attn_q.bias");
  writer.Tensor("blk.0.attn_q.bias", GgufType::kF32, {128},
                {reinterpret_cast<const char*>(bias.data()), 512});
  const std::string path = WriteGguf(writer.Bytes());
  const auto kept = TestModel::Load(path), widened = LoadWidened(path);
  CARREL_ASSERT_OK(kept);
  CARREL_ASSERT_OK(widened);
  const Matrix& blocks = kept->weights->layer(Layer(0)).q;
  ASSERT_TRUE(blocks.blocks.has_value());
  EXPECT_EQ(std::memcmp(blocks.blocks->bias, bias.data(), 512), 0);
  const Matrix& wide = widened->weights->layer(Layer(0)).q;
  ASSERT_FALSE(wide.blocks.has_value());
  EXPECT_EQ(wide.dtype, DType::kF32);
  EXPECT_EQ(std::memcmp(wide.bias, bias.data(), 512), 0);
  EXPECT_EQ(widened->weights->layer(Layer(1)).q.dtype, DType::kBf16);
}

TEST(GgufWeightsTest, Blocks_StayMappedUnlessRowsMove) {
  const std::string path = WriteGguf(MakeGguf({.types = {{"ffn_up", GgufType::kQ4_K},
                                                         {"ffn_down", GgufType::kQ2_K},
                                                         {"attn_q", GgufType::kQ8_0},
                                                         {"token", GgufType::kQ6_K}}})
                                         .Bytes());
  const auto gguf = Gguf::Open(path);
  CARREL_ASSERT_OK(gguf);
  const auto config = LoadModelConfig(path);
  const auto weights = LoadGgufWeights(*gguf, *config, nullptr);
  CARREL_ASSERT_OK(weights);
  const LayerWeights& layer = (*weights)->layer(Layer(0));
  EXPECT_EQ(layer.up.blocks->data, (*gguf)->Find("blk.0.ffn_up.weight")->bytes.data());
  EXPECT_EQ((*weights)->embedding().blocks->data, (*gguf)->Find("token_embd.weight")->bytes.data());
  EXPECT_EQ((*weights)->head().blocks->data, (*weights)->embedding().blocks->data);
  EXPECT_EQ(layer.gate.data, (*gguf)->Find("blk.0.ffn_gate.weight")->bytes.data());
  EXPECT_EQ(layer.down.blocks->data, (*gguf)->Find("blk.0.ffn_down.weight")->bytes.data());
  // Row 1 of a head's checkpoint order is row 2 of the file's.
  const absl::string_view q = (*gguf)->Find("blk.0.attn_q.weight")->bytes;
  const int64_t row = kernels::GgufBytes(GgufType::kQ8_0, 256);
  EXPECT_NE(layer.q.blocks->data, q.data());
  EXPECT_EQ(std::memcmp(static_cast<const char*>(layer.q.blocks->data) + row, q.data() + 2 * row,
                        static_cast<size_t>(row)),
            0);
  const auto widened = (*weights)->Widened(nullptr);
  CARREL_ASSERT_OK(widened);
  EXPECT_FALSE((*widened)->layer(Layer(0)).up.blocks.has_value());
  EXPECT_EQ(*(*widened)->Widened(nullptr), nullptr);
  EXPECT_EQ(WeightsSha256(**widened, nullptr), WeightsSha256(**weights, nullptr));
}

TEST(GgufWeightsTest, BlocksWithoutANumber_AreNamedAsTheFileDoes) {
  GgufWriter writer = MakeGguf({.types = {{"ffn", GgufType::kQ8_0}}});
  const std::string name = "blk.1.ffn_down.weight";
  std::string bytes(static_cast<size_t>(kernels::GgufBytes(GgufType::kQ8_0, 256 * 512)), '\0');
  bytes[0] = '\0';
  bytes[1] = '\x7c';  // the scale of the first block: infinite
  bytes[2] = '\1';
  writer.DropTensor(name).Tensor(name, GgufType::kQ8_0, {256, 512}, bytes);
  const auto model = TestModel::Load(WriteGguf(writer.Bytes()));
  CARREL_ASSERT_OK(model);
  EXPECT_THAT(NameNonFinite(*model->weights, absl::InternalError("why")),
              StatusIs(absl::StatusCode::kInternal,
                       absl::StrCat("tensor \"", name, "\" holds inf in row 0 at 0")));
}

TEST(GgufWeightsTest, Pool_ChangesNoBit) {
  const std::string path = WriteGguf(MakeGguf({.types = {{"ffn", GgufType::kIQ4_XS}}}).Bytes());
  const auto config = LoadModelConfig(path);
  CARREL_ASSERT_OK(config);
  ThreadPool pool(3);
  const auto gguf = Gguf::Open(path);
  CARREL_ASSERT_OK(gguf);
  const auto alone = LoadGgufWeights(*gguf, *config, nullptr, GgufBlocks::kWiden),
             shared = LoadGgufWeights(*gguf, *config, &pool, GgufBlocks::kWiden);
  CARREL_ASSERT_OK(alone);
  CARREL_ASSERT_OK(shared);
  for (const auto& [name, view] : (*alone)->checkpoint().tensors()) {
    EXPECT_EQ((*shared)->checkpoint().Get(name)->bytes, view.bytes) << name;
  }
}

TEST(GgufWeightsTest, Digest_CoversEveryByteNameTypeAndShapeOfTheFile) {
  const GgufTestModel model{.types = {{"ffn", GgufType::kQ4_K}}};
  const auto digest = [](const std::string& bytes) {
    const auto loaded = TestModel::Load(WriteGguf(bytes));
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return loaded.ok() ? WeightsSha256(*loaded->weights, nullptr) : "";
  };
  const std::string bytes = MakeGguf(model).Bytes();
  const std::string first = digest(bytes);
  EXPECT_EQ(digest(bytes), first);
  // A low bit of a block that bf16 would round away.
  std::string changed = bytes;
  changed[bytes.size() - 300] = static_cast<char>(changed[bytes.size() - 300] ^ 1);
  EXPECT_NE(digest(changed), first);
  // Metadata that change nothing are not part of it.
  EXPECT_EQ(digest(MakeGguf(model).String("general.name", "renamed").Bytes()), first);
  // Q4_K and Q5_K's neighbours: the same bytes as another type.
  EXPECT_NE(digest(MakeGguf({.types = {{"ffn", GgufType::kQ5_K}}}).Bytes()), first);
}

TEST(GgufWeightsTest, DigestOfFileAndFolder_IsRememberedUntilTheyChange) {
  const GgufTestModel model{.types = {{"ffn", GgufType::kQ4_K}}};
  const std::string bytes = MakeGguf(model).Bytes();
  const std::string path = WriteGguf(bytes);
  const std::string folder = path + ".folder";
  std::filesystem::create_directories(folder);
  CARREL_ASSERT_OK(WriteSameModel(model, DType::kF32, folder));
  const auto in_a_minute = [] {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::nanoseconds(now + std::chrono::minutes(1)).count();
  };
  const DigestCache cache(path + ".cache", in_a_minute);
  for (const std::string& from : {path, folder}) {
    const auto loaded = TestModel::Load(from);
    CARREL_ASSERT_OK(loaded);
    EXPECT_EQ(loaded->weights->files().size(), 1u);
    const std::string digest = WeightsSha256(*loaded->weights, nullptr);
    EXPECT_EQ(WeightsSha256(*loaded->weights, nullptr, &cache), digest);
    EXPECT_EQ(cache.Get("weights", loaded->weights->files(), [] { return std::string("new"); }),
              digest);
  }
  std::string changed = bytes;
  changed[bytes.size() - 300] = static_cast<char>(changed[bytes.size() - 300] ^ 1);
  std::ofstream(path, std::ios::binary) << changed;
  const auto loaded = TestModel::Load(path);
  CARREL_ASSERT_OK(loaded);
  EXPECT_EQ(WeightsSha256(*loaded->weights, nullptr, &cache),
            WeightsSha256(*loaded->weights, nullptr));
}

// A tiny file of the `gguf` package's, and logits that transformers computes from the package's own
// dequantised values (tools/goldens/gguf_files.py).
TEST(GgufWeightsTest, StackedExperts_GiveThePackagesValuesAndTransformersLogits) {
  const std::string folder = SourceFolder() + "/model/testdata/qwen3moe";
  const auto model = TestModel::Load(folder + "/model.gguf");
  const auto widened = LoadWidened(folder + "/model.gguf");
  const auto golden = Safetensors::OpenFile(folder + "/golden.safetensors");
  CARREL_ASSERT_OK(model);
  CARREL_ASSERT_OK(widened);
  CARREL_ASSERT_OK(golden);
  EXPECT_EQ(model->config.experts.count, 4);
  EXPECT_EQ(model->config.experts.per_token, 2);
  EXPECT_TRUE(model->config.experts.normalize && model->config.qk_norm);

  const auto stack = golden->Get("blk.1.ffn_down_exps");
  CARREL_ASSERT_OK(stack);
  const size_t one = stack->bytes.size() / 4;
  for (size_t e = 0; e < 4; ++e) {
    const Matrix& down = model->weights->layer(Layer(1)).experts[e].down;
    ASSERT_TRUE(down.blocks.has_value());
    std::vector<float> values(one / sizeof(float));
    kernels::Dequantize(down.blocks->type, down.blocks->data, down.out * down.in, values.data());
    EXPECT_EQ(std::memcmp(values.data(), stack->bytes.data() + e * one, one), 0) << "expert " << e;
  }

  std::vector<TokenId> tokens(40);
  std::vector<float> expected(40 * 64);
  std::memcpy(tokens.data(), golden->Get("input_ids")->bytes.data(), 40 * sizeof(TokenId));
  std::memcpy(expected.data(), golden->Get("logits")->bytes.data(),
              expected.size() * sizeof(float));
  for (const int64_t block : {1, 7, 40}) {
    DenseAttention attention(model->config.shape, 40, /*reference=*/true);
    const auto logits = Forward(*model, tokens, 0, block, nullptr, attention);
    CARREL_ASSERT_OK(logits);
    // Products of few tokens round their inputs to 16 bits.
    EXPECT_LE(RelativeError(*logits, expected), 5e-4) << "blocks of " << block;
    const auto rounded = Forward(*widened, tokens, 0, block, nullptr, attention);
    CARREL_ASSERT_OK(rounded);
    EXPECT_LE(RelativeError(*rounded, expected), 2e-2) << "blocks of " << block;
  }
}

TEST(GgufWeightsTest, StacksThatAreNotTheModels_AreNamed) {
  const auto load = [](const GgufWriter& writer) {
    return TestModel::Load(WriteGguf(writer.Bytes())).status();
  };
  const std::string data(4 * 8 * 8 * 4, '\0');
  EXPECT_THAT(
      load(MakeGguf({}).Tensor("blk.0.ffn_up_exps.weight", GgufType::kF32, {4, 8, 8}, data)),
      StatusIs(Code::kInvalidArgument, "\"blk.0.ffn_up_exps.weight\" is not a stack of 0"));
  GgufTestModel moe{.architecture = "qwen3"};
  GgufWriter writer = MakeGguf(moe);
  writer.Drop("general.architecture").String("general.architecture", "qwen3moe");
  EXPECT_THAT(load(writer), StatusIs(Code::kInvalidArgument, "qwen3moe."));
}

TEST(GgufWeightsTest, RandomMutations_GiveAModelOrAnError) {
  std::mt19937_64 rng(TestSeed());
  GgufWriter writer = MakeGguf({.architecture = "qwen2", .types = {{"ffn", GgufType::kQ4_K}}});
  const std::string whole = writer.Bytes();
  const std::string path = WriteGguf(whole);
  const size_t header = whole.find("output_norm.weight") + 50;
  int loaded = 0, refused = 0;
  for (int round = 0; round < 300; ++round) {
    std::ofstream(path, std::ios::binary) << Mutate(whole, header, rng);
    const auto model = TestModel::Load(path);
    ++(model.ok() ? loaded : refused);
    const Code code = model.status().code();
    EXPECT_TRUE(model.ok() || code == Code::kInvalidArgument || code == Code::kUnimplemented)
        << model.status();
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(loaded, 0);
}

TEST(GgufWeightsTest, TensorsThatAreNotTheModels_AreNamedAsTheFileDoes) {
  const auto load = [](const GgufWriter& writer) {
    return TestModel::Load(WriteGguf(writer.Bytes())).status();
  };
  const std::string data(64 * 4, '\0');
  EXPECT_THAT(load(MakeGguf({}).DropTensor("blk.1.ffn_up.weight")),
              StatusIs(Code::kInvalidArgument, "tensor \"blk.1.ffn_up.weight\" is missing"));
  EXPECT_THAT(load(MakeGguf({}).Tensor("blk.7.ffn_up.weight", GgufType::kF32, {8, 8}, data)),
              StatusIs(Code::kInvalidArgument, "\"blk.7.ffn_up.weight\""));
  EXPECT_THAT(load(MakeGguf({}).Tensor("blk.0.ssm_a", GgufType::kF32, {64}, data)),
              StatusIs(Code::kInvalidArgument, "\"blk.0.ssm_a\" is not part of a model"));
  EXPECT_THAT(load(MakeGguf({}).Tensor("blk.00.ffn_up.weight", GgufType::kF32, {64}, data)),
              StatusIs(Code::kInvalidArgument, "blk.00.ffn_up.weight"));
  GgufWriter rows = MakeGguf({});
  rows.DropTensor("blk.0.attn_k.weight");
  rows.Tensor("blk.0.attn_k.weight", GgufType::kF32, {8, 8}, data);
  GgufWriter blocks = MakeGguf({});
  blocks.DropTensor("blk.0.ffn_up.weight");
  blocks.Tensor("blk.0.ffn_up.weight", GgufType::kQ8_0, {1, 32}, std::string(34, '\0'));
  EXPECT_THAT(load(blocks), StatusIs(Code::kInvalidArgument,
                                     "\"blk.0.ffn_up.weight\" is Q8_0 [1, 32], expected"));
  EXPECT_THAT(load(MakeGguf({}).Tensor("blk.2.ffn_up.weight", GgufType::kQ8_0, {1, 32},
                                       std::string(34, '\0'))),
              StatusIs(Code::kInvalidArgument, "\"blk.2.ffn_up.weight\" (Q8_0 [1, 32])"));
  EXPECT_THAT(load(rows), StatusIs(Code::kInvalidArgument, "has 8 rows, not 2 heads of 32"));
  GgufWriter vector = MakeGguf({});
  vector.DropTensor("output_norm.weight");
  vector.Tensor("output_norm.weight", GgufType::kQ8_0, {64}, std::string(68, '\0'));
  EXPECT_THAT(load(vector), StatusIs(Code::kInvalidArgument, "is a vector of Q8_0"));
}

}  // namespace
}  // namespace carrel::model
