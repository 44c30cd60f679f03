// Tiny random checkpoints of each family against what transformers computes from them
// (tools/goldens/families.py), and of models as they are published (published.py).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/test_models.h"

namespace carrel::model {
namespace {

constexpr double kTolerance = 1e-5;

template <typename T>
std::vector<T> Values(const Safetensors& file, const std::string& name) {
  const auto view = file.Get(name);
  EXPECT_TRUE(view.ok()) << view.status();
  if (!view.ok()) return {};
  std::vector<T> values(view->bytes.size() / sizeof(T));
  std::memcpy(values.data(), view->bytes.data(), view->bytes.size());
  return values;
}

// file: the model, in the folder; empty: the folder.
void ExpectLogitsOfTransformers(const std::string& folder, const std::string& file) {
  const auto model = TestModel::Load(folder + file);
  CARREL_ASSERT_OK(model);
  const auto golden = Safetensors::OpenFile(folder + "/golden.safetensors");
  CARREL_ASSERT_OK(golden);
  const auto tokens = Values<int32_t>(*golden, "input_ids");
  const auto expected = Values<float>(*golden, "logits");
  const int64_t n = static_cast<int64_t>(tokens.size());
  ASSERT_GT(n, 0);
  ThreadPool pool(1);
  for (int64_t block : {int64_t{1}, int64_t{7}, n}) {
    DenseAttention attention(model->config.shape, n, /*reference=*/true, model->config.Windows());
    auto logits = Forward(*model, tokens, 0, block, &pool, attention);
    CARREL_ASSERT_OK(logits);
    // Of long texts, the last logits are kept.
    ASSERT_GE(logits->size(), expected.size());
    logits->erase(logits->begin(), logits->end() - static_cast<std::ptrdiff_t>(expected.size()));
    EXPECT_LE(RelativeError(*logits, expected), kTolerance) << "blocks of " << block;
  }
}

class FamilyTest : public testing::TestWithParam<const char*> {};

TEST_P(FamilyTest, Logits_EqualThoseOfTransformers) {
  ExpectLogitsOfTransformers(SourceFolder() + "/model/testdata/families/" + GetParam(), "");
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, FamilyTest,
                         testing::Values("yarn", "qwen3_moe", "qwen3_moe_mixed", "gemma3"),
                         [](const auto& info) { return std::string(info.param); });

class PublishedTest : public testing::TestWithParam<const char*> {
 protected:
  const std::string folder_ = SourceFolder() + "/model/testdata/published/" + GetParam();
};

TEST_P(PublishedTest, FolderAndGguf_GiveTheLogitsOfTransformers) {
  for (const char* file : {"", "/model.gguf"}) {
    SCOPED_TRACE(file);
    ExpectLogitsOfTransformers(folder_, file);
  }
}

TEST_P(PublishedTest, FolderAndGguf_AreTheSameModel) {
  const auto folder = LoadModelConfig(folder_);
  const auto gguf = LoadModelConfig(folder_ + "/model.gguf");
  CARREL_ASSERT_OK(folder);
  CARREL_ASSERT_OK(gguf);
  EXPECT_EQ(folder->window_limit, gguf->window_limit);
  EXPECT_EQ(folder->MaxTokens(true), gguf->MaxTokens(true));
  auto theirs = gguf->FingerprintFields(), ours = folder->FingerprintFields();
  // The architecture llama is Mistral's, too.
  for (auto* fields : {&theirs, &ours}) {
    std::erase_if(*fields, [](const auto& field) { return field.first == "architecture"; });
  }
  EXPECT_EQ(theirs, ours);
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, PublishedTest,
                         testing::Values("llama-3.1-8b", "gemma-3-1b", "qwen3-coder-30b-a3b",
                                         "deepseek-r1-0528-qwen3-8b", "mistral-7b-v0.1"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return !isalnum(c); }, '_');
                           return name;
                         });

// What config.json says, as it was published.
absl::StatusOr<ModelConfig> LoadPublished(const std::string& name) {
  const std::string folder = FreshTempDir();
  std::filesystem::copy(SourceFolder() + "/tests/published/" + name + ".json",
                        folder + "/config.json");
  return LoadModelConfig(folder);
}

TEST(PublishedConfigTest, EachIsRead) {
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(SourceFolder() + "/tests/published")) {
    if (entry.path().extension() != ".json") continue;
    CARREL_EXPECT_OK(LoadPublished(entry.path().stem().string())) << entry.path();
    ++files;
  }
  EXPECT_GE(files, 6);
  const auto r1 = LoadPublished("deepseek-r1-0528-qwen3-8b");
  CARREL_ASSERT_OK(r1);
  EXPECT_NEAR(r1->rope.attention_factor, 0.1 * std::log(4.0) + 1, 1e-12);
  const auto mistral = LoadPublished("mistral-7b-v0.1");
  CARREL_ASSERT_OK(mistral);
  EXPECT_EQ(mistral->max_position_embeddings, 32768);
  EXPECT_EQ(mistral->MaxTokens(), 4096);
  const auto ministral = LoadPublished("ministral-8b-2410");
  CARREL_ASSERT_OK(ministral);
  EXPECT_EQ(ministral->MaxTokens(), 32768);
  EXPECT_EQ(ministral->MaxTokens(/*beyond_trained=*/true), 32768);
}

}  // namespace
}  // namespace carrel::model
