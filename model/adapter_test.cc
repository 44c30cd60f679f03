#include "model/adapter.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/file.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/test_models.h"
#include "model/weights.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;

constexpr double kTolerance = 1e-5;

// What PEFT computes (tools/goldens/adapters.py).
std::string Golden(const std::string& name) {
  return SourceFolder() + "/model/testdata/adapters/" + name;
}

absl::StatusOr<TestModel> LoadAdapted(const std::string& base, const std::string& adapter) {
  auto model = TestModel::Load(base);
  if (!model.ok()) return model.status();
  auto loaded = Adapter::Load(adapter, model->config);
  if (!loaded.ok()) return loaded.status();
  model->adapter = *std::move(loaded);
  return model;
}

template <typename T>
std::vector<T> Values(const Safetensors& file, const std::string& name) {
  const auto view = file.Get(name);
  EXPECT_TRUE(view.ok()) << view.status();
  if (!view.ok()) return {};
  std::vector<T> values(view->bytes.size() / sizeof(T));
  std::memcpy(values.data(), view->bytes.data(), view->bytes.size());
  return values;
}

std::vector<float> LogitsOf(const TestModel& model, const std::vector<TokenId>& tokens,
                            int64_t block, ThreadPool* pool = nullptr) {
  DenseAttention attention(model.config.shape, static_cast<int64_t>(tokens.size()), true);
  auto logits = Forward(model, tokens, 0, block, pool, attention);
  EXPECT_TRUE(logits.ok()) << logits.status();
  return logits.ok() ? *std::move(logits) : std::vector<float>();
}

class AdapterGoldenTest : public testing::TestWithParam<const char*> {};

TEST_P(AdapterGoldenTest, Logits_EqualThoseOfPeft) {
  const auto golden = Safetensors::OpenFile(Golden("golden.safetensors"));
  CARREL_ASSERT_OK(golden);
  const auto model = LoadAdapted(Golden("base"), Golden(GetParam()));
  CARREL_ASSERT_OK(model);
  const auto tokens = Values<int32_t>(*golden, "input_ids");
  const auto expected = Values<float>(*golden, absl::StrCat("logits.", GetParam()));
  for (int64_t block : {1, 5, 24}) {
    EXPECT_LE(RelativeError(LogitsOf(*model, tokens, block), expected), kTolerance)
        << "blocks of " << block;
  }
  // And without the adapter they are far away.
  const auto base = TestModel::Load(Golden("base"));
  CARREL_ASSERT_OK(base);
  const std::vector<float> plain = LogitsOf(*base, tokens, 24);
  EXPECT_LE(RelativeError(plain, Values<float>(*golden, "logits.base")), kTolerance);
  EXPECT_GT(RelativeError(plain, expected), 0.1);
}

INSTANTIATE_TEST_SUITE_P(Peft, AdapterGoldenTest, testing::Values("all", "some"),
                         [](const auto& info) { return std::string(info.param); });

// A random model, a random adapter to it, and the same model with merged float weights.
class RandomAdapterTest : public testing::Test {
 protected:
  static constexpr char kConfig[] =
      R"({"model_type": "qwen2", "vocab_size": 61, "hidden_size": 40, "intermediate_size": 700,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 10, "max_position_embeddings": 512})";

  void SetUp() override {
    seed_ = TestSeed();
    folder_ = FreshTempDir();
    for (const char* name : {"base", "merged", "adapter"}) {
      std::filesystem::create_directories(path(name));
    }
    CARREL_ASSERT_OK(WriteRandomModel(path("base"), kConfig, seed_));
    fields_ = {{"peft_type", "LORA"}, {"r", 3}, {"lora_alpha", 6}, {"bias", "none"}};
    fields_["target_modules"] = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                 "gate_proj", "up_proj", "down_proj"};
  }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  static NamedTensor Named(const std::string& name, std::vector<int64_t> shape,
                           const std::vector<float>& values) {
    return {name,
            {DType::kF32, std::move(shape),
             absl::string_view(reinterpret_cast<const char*>(values.data()),
                               values.size() * sizeof(float))}};
  }

  // Writes the adapter (tensors as `edit` leaves them), and the merged model.
  void Write(const std::function<void(std::vector<NamedTensor>&)>& edit = nullptr) {
    std::mt19937_64 rng(seed_ + 1);
    std::normal_distribution<float> normal(0.0f, 0.3f);
    const auto base = Safetensors::OpenModel(path("base"));
    CARREL_ASSERT_OK(base);
    std::vector<std::vector<float>> storage;
    storage.reserve(200);
    std::vector<NamedTensor> merged, added;
    for (const auto& [name, view] : base->tensors()) {
      if (name.find("_proj.weight") == std::string::npos) {
        merged.push_back({name, view});
        continue;
      }
      const int64_t out = view.shape[0], in = view.shape[1], rank = 3;
      const auto random = [&](int64_t count) -> const std::vector<float>& {
        std::vector<float>& values = storage.emplace_back(static_cast<size_t>(count));
        for (float& x : values) x = normal(rng);
        return values;
      };
      const auto &a = random(rank * in), &b = random(out * rank);
      std::vector<float>& w = storage.emplace_back(Values<float>(*base, name));
      for (int64_t i = 0; i < out * in; ++i) {
        double sum = 0;
        for (int64_t r = 0; r < rank; ++r) {
          sum += 2.0 * b[i / in * rank + r] * a[r * in + i % in];
        }
        w[i] += static_cast<float>(sum);
      }
      merged.push_back(Named(name, view.shape, w));
      const std::string prefix =
          "base_model.model." + name.substr(0, name.size() - std::strlen("weight"));
      added.push_back(Named(prefix + "lora_A.weight", {rank, in}, a));
      added.push_back(Named(prefix + "lora_B.weight", {out, rank}, b));
    }
    if (edit) edit(added);
    CARREL_ASSERT_OK(WriteFileAtomically(path("merged/config.json"), kConfig));
    CARREL_ASSERT_OK(WriteSafetensors(path("merged/model.safetensors"), merged));
    CARREL_ASSERT_OK(WriteSafetensors(path("adapter/adapter_model.safetensors"), added));
    CARREL_ASSERT_OK(WriteFileAtomically(path("adapter/adapter_config.json"), fields_.dump()));
  }

  absl::Status LoadStatus() {
    const auto model = LoadAdapted(path("base"), path("adapter"));
    return model.status();
  }

  uint64_t seed_ = 0;
  std::string folder_;
  json fields_;
};

TEST_F(RandomAdapterTest, Logits_EqualThoseOfMergedFloatWeights) {
  Write();
  const auto adapted = LoadAdapted(path("base"), path("adapter"));
  const auto merged = TestModel::Load(path("merged"));
  CARREL_ASSERT_OK(adapted);
  CARREL_ASSERT_OK(merged);
  std::mt19937_64 rng(seed_);
  std::vector<TokenId> tokens(150);
  for (TokenId& token : tokens) token = static_cast<TokenId>(rng() % 61);
  for (int64_t block : {1, 7, 70, 150}) {
    EXPECT_LE(RelativeError(LogitsOf(*adapted, tokens, block), LogitsOf(*merged, tokens, block)),
              kTolerance)
        << "blocks of " << block;
  }
}

TEST_F(RandomAdapterTest, AnyThreads_SameBits) {
  Write();
  const auto adapted = LoadAdapted(path("base"), path("adapter"));
  CARREL_ASSERT_OK(adapted);
  std::vector<TokenId> tokens(300);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>(i * 7 % 61);
  for (int64_t block : {3, 300}) {
    const std::vector<float> expected = LogitsOf(*adapted, tokens, block);
    for (int threads : {1, 3}) {
      ThreadPool pool(threads);
      EXPECT_TRUE(LogitsOf(*adapted, tokens, block, &pool) == expected) << threads << " threads";
    }
  }
}

TEST_F(RandomAdapterTest, LowRankProduct_AnyPart_IsTheScaledProduct) {
  Write();
  const auto model = LoadAdapted(path("base"), path("adapter"));
  CARREL_ASSERT_OK(model);
  const LowRank* added = model->adapter->Find(Layer(1), Projection::kK);
  ASSERT_NE(added, nullptr);
  const auto base = Safetensors::OpenModel(path("base")),
             merged = Safetensors::OpenModel(path("merged"));
  CARREL_ASSERT_OK(base);
  CARREL_ASSERT_OK(merged);
  const std::string name = "model.layers.1.self_attn.k_proj.weight";
  std::vector<float> sums = Values<float>(*base, name);
  const LowRankProduct product(*added);
  const int64_t size = static_cast<int64_t>(sums.size());
  for (int64_t begin = 0; begin < size; begin += 33) {  // parts that end inside rows
    product.AddTo(begin, std::min<int64_t>(33, size - begin), sums.data() + begin);
  }
  EXPECT_LE(RelativeError(sums, Values<float>(*merged, name)), 1e-6);
}

TEST_F(RandomAdapterTest, Digest_ChangesWithScaleAndTensors) {
  Write();
  const auto digest = [&] { return LoadAdapted(path("base"), path("adapter"))->adapter->sha256(); };
  const std::string first = digest();
  EXPECT_EQ(first.size(), 64u);
  EXPECT_EQ(digest(), first);
  fields_["lora_alpha"] = 7;
  Write();
  EXPECT_NE(digest(), first);
  fields_["lora_alpha"] = 6;
  seed_ += 1;
  Write();
  EXPECT_NE(digest(), first);
}

TEST_F(RandomAdapterTest, Tensor_MissingExtraOrMisshapen_IsNamed) {
  using Tensors = std::vector<NamedTensor>;
  const std::string q = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight";
  const auto find = [&](Tensors& tensors, const std::string& name) {
    return std::find_if(tensors.begin(), tensors.end(),
                        [&](const NamedTensor& t) { return t.name == name; });
  };
  Write([&](Tensors& t) { t.erase(find(t, q)); });
  EXPECT_THAT(LoadStatus(), StatusIs(absl::StatusCode::kInvalidArgument, q));
  Write([&](Tensors& t) { std::swap(find(t, q)->view.shape[0], find(t, q)->view.shape[1]); });
  EXPECT_THAT(LoadStatus(), StatusIs(absl::StatusCode::kInvalidArgument, "[3, 40], expected"));
  Write([&](Tensors& t) { find(t, q)->view.dtype = DType::kI32; });
  EXPECT_THAT(LoadStatus(), StatusIs(absl::StatusCode::kInvalidArgument, "is i32"));
  const std::vector<float> four(4);
  for (const std::string extra : {"base_model.model.lm_head.lora_A.weight",
                                  "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight",
                                  "base_model.model.model.layers.1.self_attn.q_proj.lora_B.bias"}) {
    Write([&](Tensors& t) { t.push_back(Named(extra, {4}, four)); });
    EXPECT_THAT(LoadStatus(), StatusIs(absl::StatusCode::kInvalidArgument, extra));
  }
  Write([&](Tensors& t) { t.push_back(Named(std::string(1000000, 'z'), {4}, four)); });
  EXPECT_LT(LoadStatus().message().size(), 2000u);
  // A projection that target_modules does not name is an extra, too.
  fields_["target_modules"].erase(0);
  Write();
  EXPECT_THAT(LoadStatus(), StatusIs(absl::StatusCode::kInvalidArgument, "q_proj.lora_A"));
  fields_["r"] = 4;
  Write();
  EXPECT_THAT(LoadStatus(), StatusIs(absl::StatusCode::kInvalidArgument, "expected f32"));
}

// As Python's re.fullmatch has it: what Unsloth and recipes of multimodal models write.
TEST_F(RandomAdapterTest, Targets_AsAPattern) {
  for (
      const char* all :
      {R"(.*\.(?:q|k|v|o|gate|up|down)_proj)",
       R"(model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj)",
       R"((?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|k_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj))))"}) {
    fields_["target_modules"] = all;
    Write();
    CARREL_EXPECT_OK(LoadStatus()) << all;
  }
  // All of a name, and not a part of it; what is left over is named, and so is what is missing.
  fields_["target_modules"] = "q_proj";
  Write();
  EXPECT_THAT(LoadStatus(), StatusIs(absl::StatusCode::kInvalidArgument, "is of no projection"));
  fields_["target_modules"] = ".*[qk]_proj";
  Write();
  EXPECT_THAT(LoadStatus(), StatusIs(absl::StatusCode::kInvalidArgument, "is of no projection"));
  fields_["target_modules"] = ".*_proj";
  fields_["layers_to_transform"] = {0};
  Write();
  EXPECT_THAT(LoadStatus(), StatusIs(absl::StatusCode::kInvalidArgument,
                                     "layers_to_transform=[0] stands beside"));
  fields_.erase("layers_to_transform");
  // A pattern that would take for ever.
  fields_["target_modules"] = "(.+)+[XZ]";
  Write();
  EXPECT_THAT(LoadStatus(), StatusIs(absl::StatusCode::kInvalidArgument, "cannot be matched"));
}

TEST_F(RandomAdapterTest, Option_NotRun_IsNamed) {
  const std::pair<const char*, json> cases[] = {
      {"peft_type", "IA3"},
      {"bias", "lora_only"},
      {"use_dora", true},
      {"fan_in_fan_out", true},
      {"lora_bias", true},
      {"modules_to_save", {"lm_head"}},
      {"rank_pattern", {{"q_proj", 8}}},
      {"alpha_pattern", {{"q_proj", 8}}},
      {"trainable_token_indices", {1, 2}},
      {"layer_replication", {{0, 1}}},
      {"init_lora_weights", "pissa"},
      {"target_modules", {{"a", 1}}},
      {"an_option_of_tomorrow", 1},
  };
  const json usual = fields_;
  for (const auto& [name, value] : cases) {
    fields_ = usual;
    fields_[name] = value;
    Write();
    EXPECT_THAT(LoadStatus(), StatusIs(absl::StatusCode::kUnimplemented, name)) << value;
  }
  const std::pair<const char*, json> bad[] = {{"r", 0},
                                              {"r", "3"},
                                              {"lora_alpha", -1},
                                              {"target_modules", json::array({1})},
                                              {"target_modules", "(q_proj"},
                                              {"target_modules", nullptr},
                                              {"layers_to_transform", {2}}};
  for (const auto& [name, value] : bad) {
    fields_ = usual;
    fields_[name] = value;
    Write();
    EXPECT_THAT(LoadStatus(), StatusIs(absl::StatusCode::kInvalidArgument, name)) << value;
  }
  std::filesystem::remove(path("adapter/adapter_config.json"));
  EXPECT_EQ(LoadStatus().code(), absl::StatusCode::kNotFound);
}

TEST_F(RandomAdapterTest, ConfigBeside_ReplacesRopeAndLengthAlone) {
  const auto base = LoadModelConfig(path("base"));
  CARREL_ASSERT_OK(base);
  ModelConfig config = *base;
  CARREL_ASSERT_OK(ReadAdapterConfig(path("adapter"), config));  // none there
  EXPECT_EQ(config.FingerprintFields(), base->FingerprintFields());
  json own = json::parse(kConfig);
  own["rope_theta"] = 5e6;
  own["max_position_embeddings"] = 4096;
  CARREL_ASSERT_OK(WriteFileAtomically(path("adapter/config.json"), own.dump()));
  CARREL_ASSERT_OK(ReadAdapterConfig(path("adapter"), config));
  EXPECT_EQ(config.rope.theta, 5e6);
  EXPECT_EQ(config.max_position_embeddings, 4096);
  own["rms_norm_eps"] = 1e-3;
  CARREL_ASSERT_OK(WriteFileAtomically(path("adapter/config.json"), own.dump()));
  EXPECT_THAT(ReadAdapterConfig(path("adapter"), config),
              StatusIs(absl::StatusCode::kInvalidArgument, "rms_norm_eps=0.001"));
}

TEST_F(RandomAdapterTest, AdapterInTheModelsFolder_IsRefusedUnlessAskedFor) {
  Write();
  CARREL_EXPECT_OK(CheckNoOtherAdapter(path("base"), ""));
  CARREL_EXPECT_OK(CheckNoOtherAdapter(path("base"), path("adapter")));
  std::filesystem::copy(path("adapter/adapter_config.json"), path("base/adapter_config.json"));
  for (const std::string& given : {std::string(), path("adapter")}) {
    EXPECT_THAT(CheckNoOtherAdapter(path("base"), given),
                StatusIs(absl::StatusCode::kInvalidArgument, "--adapter " + path("base")));
  }
  CARREL_EXPECT_OK(CheckNoOtherAdapter(path("base"), path("base") + "/"));
}

}  // namespace
}  // namespace carrel::model
