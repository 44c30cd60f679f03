#include "model/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/file.h"
#include "common/test_util.h"
#include "model/cpu_backend.h"
#include "model/fingerprint.h"
#include "model/non_finite.h"
#include "model/test_models.h"

namespace carrel::model {
namespace {

using Code = absl::StatusCode;
using testing::Pair;

constexpr char kTinyLlama[] = R"({"model_type": "llama", "vocab_size": 48, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "attention_bias": true, "tie_word_embeddings": %s})";

std::string TinyLlama(bool tied) {
  std::string text = kTinyLlama;
  return text.replace(text.find("%s"), 2, tied ? "true" : "false");
}

// Rewrites the checkpoint of a folder after `change` has had its tensors.
void Rewrite(const std::string& folder,
             const std::function<void(std::vector<NamedTensor>&)>& change) {
  const std::string path = folder + "/model.safetensors";
  const auto file = Safetensors::OpenFile(path);
  CARREL_ASSERT_OK(file);
  std::vector<NamedTensor> tensors;
  for (const auto& [name, view] : file->tensors()) tensors.push_back({name, view});
  change(tensors);
  CARREL_ASSERT_OK(WriteSafetensors(path, tensors));
}

NamedTensor& Find(std::vector<NamedTensor>& tensors, const std::string& name) {
  for (NamedTensor& tensor : tensors) {
    if (tensor.name == name) return tensor;
  }
  ADD_FAILURE() << "no tensor " << name;
  return tensors.front();
}

class WeightsTest : public testing::Test {
 protected:
  void Make(bool tied) {
    folder_ = FreshTempDir();
    CARREL_ASSERT_OK(WriteRandomModel(folder_, TinyLlama(tied), TestSeed()));
  }
  absl::Status Load() { return TestModel::Load(folder_).status(); }
  std::string Sha() {
    ThreadPool pool(1);
    const auto model = TestModel::Load(folder_);
    EXPECT_TRUE(model.ok()) << model.status();
    const std::string sha = WeightsSha256(*model->weights, &pool);
    EXPECT_EQ(sha, WeightsSha256(*model->weights, nullptr));
    return sha;
  }
  std::string folder_;
};

TEST_F(WeightsTest, MissingTensor_IsNamedWithWhatWasExpected) {
  Make(false);
  Rewrite(folder_, [](std::vector<NamedTensor>& tensors) {
    std::erase_if(tensors, [](const NamedTensor& t) {
      return t.name == "model.layers.1.self_attn.k_proj.bias";
    });
  });
  EXPECT_THAT(Load(), StatusIs(Code::kInvalidArgument,
                               "tensor \"model.layers.1.self_attn.k_proj.bias\" is missing; "
                               "expected f32, f16 or bf16 [16]"));
}

TEST_F(WeightsTest, OtherShape_IsNamedWithFoundAndExpected) {
  Make(false);
  Rewrite(folder_, [](std::vector<NamedTensor>& tensors) {
    Find(tensors, "model.layers.0.mlp.down_proj.weight").view.shape = {24, 16};
  });
  EXPECT_THAT(Load(), StatusIs(Code::kInvalidArgument,
                               "tensor \"model.layers.0.mlp.down_proj.weight\" is f32 [24, 16], "
                               "expected f32, f16 or bf16 [16, 24]"));
}

TEST_F(WeightsTest, OtherDtype_IsNamedWithFoundAndExpected) {
  Make(false);
  Rewrite(folder_, [](std::vector<NamedTensor>& tensors) {
    Find(tensors, "model.norm.weight").view.dtype = DType::kI32;
  });
  EXPECT_THAT(Load(), StatusIs(Code::kInvalidArgument,
                               "tensor \"model.norm.weight\" is i32 [16], expected f32"));
}

TEST_F(WeightsTest, BiasOfAnotherDtypeThanItsWeight_IsRefused) {
  Make(false);
  Rewrite(folder_, [](std::vector<NamedTensor>& tensors) {
    TensorView& bias = Find(tensors, "model.layers.0.self_attn.q_proj.bias").view;
    bias.dtype = DType::kF16;
    bias.bytes = bias.bytes.substr(0, bias.bytes.size() / 2);
  });
  EXPECT_THAT(Load(), StatusIs(Code::kInvalidArgument,
                               "q_proj.bias\" is f16, expected f32 as its weight is"));
}

TEST_F(WeightsTest, UnexpectedTensor_IsRefusedByNameUnlessItCarriesNothing) {
  Make(false);
  Rewrite(folder_, [](std::vector<NamedTensor>& tensors) {
    tensors.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq",
                       {DType::kF32, {1}, absl::string_view("1234")}});
  });
  CARREL_EXPECT_OK(Load());
  Rewrite(folder_, [](std::vector<NamedTensor>& tensors) {
    tensors.push_back(
        {"model.layers.2.input_layernorm.weight", {DType::kF32, {1}, absl::string_view("1234")}});
  });
  EXPECT_THAT(Load(), StatusIs(Code::kInvalidArgument,
                               "tensor \"model.layers.2.input_layernorm.weight\" (f32 [1]) is not "
                               "part of the model"));
  Rewrite(folder_, [](std::vector<NamedTensor>& tensors) {
    std::erase_if(tensors, [](const NamedTensor& t) {
      return t.name == "model.layers.2.input_layernorm.weight";
    });
    tensors.push_back({std::string(1000000, 'z'), {DType::kF32, {1}, absl::string_view("1234")}});
  });
  const absl::Status refused = Load();
  EXPECT_THAT(refused, StatusIs(Code::kInvalidArgument, "zzz... (1000000 bytes)"));
  EXPECT_LT(refused.message().size(), 2000u);
}

TEST_F(WeightsTest, HeadOfATiedModel_MayOnlyBeACopy) {
  Make(true);
  CARREL_EXPECT_OK(Load());
  const auto add_head = [this](const char* source) {
    Rewrite(folder_, [&](std::vector<NamedTensor>& tensors) {
      std::erase_if(tensors, [](const NamedTensor& t) { return t.name == "lm_head.weight"; });
      const TensorView view = Find(tensors, source).view;
      tensors.push_back({"lm_head.weight", view});
    });
  };
  add_head("model.embed_tokens.weight");
  CARREL_EXPECT_OK(Load());
  add_head("model.layers.0.mlp.up_proj.weight");
  EXPECT_THAT(Load(),
              StatusIs(Code::kInvalidArgument, "tensor \"lm_head.weight\" is f32 [24, 16]"));
  std::string other;
  Rewrite(folder_, [&](std::vector<NamedTensor>& tensors) {
    TensorView& head = Find(tensors, "lm_head.weight").view;
    head = Find(tensors, "model.embed_tokens.weight").view;
    other = std::string(head.bytes);
    other[5] ^= 1;
    head.bytes = other;
  });
  EXPECT_THAT(Load(), StatusIs(Code::kInvalidArgument,
                               "differs from model.embed_tokens.weight although tie_word"));
}

TEST_F(WeightsTest, HeadOfAnUntiedModel_MustBeThere) {
  Make(true);
  CARREL_ASSERT_OK(WriteFileAtomically(folder_ + "/config.json", TinyLlama(false)));
  EXPECT_THAT(Load(), StatusIs(Code::kInvalidArgument, "tensor \"lm_head.weight\" is missing"));
}

TEST_F(WeightsTest, NumbersThatAreNone_AreNamedByTensorAndPlace) {
  Make(true);
  const absl::Status status = absl::InternalError("logit of token 3 is not a number");
  {
    const auto model = TestModel::Load(folder_);
    CARREL_ASSERT_OK(model);
    EXPECT_EQ(NameNonFinite(*model->weights, status), status);
  }
  const std::string name = "model.layers.1.mlp.down_proj.weight";  // [16, 24]
  for (const auto& [value, text] : {std::pair<float, const char*>{NAN, "nan"}, {INFINITY, "inf"}}) {
    std::string bytes;
    Rewrite(folder_, [&](std::vector<NamedTensor>& tensors) {
      NamedTensor& tensor = Find(tensors, name);
      bytes = std::string(tensor.view.bytes);
      std::memcpy(&bytes[(5 * 24 + 7) * sizeof(float)], &value, sizeof(value));
      tensor.view.bytes = bytes;
    });
    const auto model = TestModel::Load(folder_);
    CARREL_ASSERT_OK(model);
    EXPECT_THAT(
        NameNonFinite(*model->weights, status),
        StatusIs(Code::kInternal, absl::StrCat("is not a number: tensor \"", name, "\" holds ",
                                               text, " in row 5 at 7 of [16, 24]")));
  }
}

TEST_F(WeightsTest, NoCheckpoint_IsNotFound) {
  Make(true);
  std::filesystem::remove(folder_ + "/model.safetensors");
  EXPECT_THAT(Load(), StatusIs(Code::kNotFound, "neither model.safetensors nor"));
}

TEST_F(WeightsTest, Sha256_DependsOnWeightsNotOnFiles) {
  Make(false);
  const std::string whole = Sha();
  EXPECT_EQ(whole.size(), 64u);

  // The same tensors in another order.
  Rewrite(folder_,
          [](std::vector<NamedTensor>& tensors) { std::reverse(tensors.begin(), tensors.end()); });
  EXPECT_EQ(Sha(), whole);

  // The same tensors in two shards.
  const std::string single = folder_ + "/model.safetensors";
  {
    const auto file = Safetensors::OpenFile(single);
    CARREL_ASSERT_OK(file);
    std::vector<NamedTensor> shards[2];
    std::string map;
    for (const auto& [name, view] : file->tensors()) {
      const int shard = static_cast<int>(name.size() % 2);
      shards[shard].push_back({name, view});
      absl::StrAppend(&map, map.empty() ? "" : ",", "\"", name, "\": \"s", shard, "\"");
    }
    for (int i : {0, 1}) {
      CARREL_ASSERT_OK(WriteSafetensors(absl::StrCat(folder_, "/s", i), shards[i]));
    }
    CARREL_ASSERT_OK(WriteFileAtomically(folder_ + "/model.safetensors.index.json",
                                         absl::StrCat("{\"weight_map\": {", map, "}}")));
    std::filesystem::rename(single, folder_ + "/kept");
  }
  EXPECT_EQ(Sha(), whole);
  std::filesystem::rename(folder_ + "/kept", single);

  // One bit of one weight.
  std::string bytes = *ReadFile(single);
  bytes.back() ^= 1;
  CARREL_ASSERT_OK(WriteFileAtomically(single, bytes));
  EXPECT_NE(Sha(), whole);
}

TEST(WeightsSha256Test, DemoModel_EqualsAnIndependentComputation) {
  const auto model = TestModel::Load(DemoModelDir());
  CARREL_ASSERT_OK(model);
  EXPECT_EQ(WeightsSha256(*model->weights, nullptr),
            "65fc77cc20117480d24c9ee6ac4710ca4dbe72fa0d62ed848e6e5cee5b411d64");
}

TEST(ModelFingerprintTest, Fields_AreOrderedUniqueAndComplete) {
  const auto config = LoadModelConfig(DemoModelDir());
  CARREL_ASSERT_OK(config);
  const auto fields = ModelFingerprint(*config, "aa", "bb");
  for (size_t i = 1; i < fields.size(); ++i) EXPECT_LT(fields[i - 1].first, fields[i].first);
  EXPECT_THAT(fields, testing::IsSupersetOf(config->FingerprintFields()));
  EXPECT_THAT(fields, testing::IsSupersetOf(std::vector<std::pair<std::string, std::string>>{
                          {"weights_sha256", "aa"},
                          {"tokenizer_sha256", "bb"},
                          {"kv_dtype", "bf16"},
                          {"key_position", "after_rope"},
                          {"kv_layout", "layer,kv_head,token,head_dim"},
                          {"format_version", "1"},
                          {"rope_theta", "500000"},
                          {"rms_norm_eps", "1e-05"}}));
  EXPECT_EQ(fields.size(), config->FingerprintFields().size() + 6);
  EXPECT_THAT(ModelFingerprint(*config, "aa", ""),
              testing::Contains(Pair("tokenizer_sha256", "none")));
}

}  // namespace
}  // namespace carrel::model
