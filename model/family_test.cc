// Tiny random checkpoints of each family against what transformers computes from them
// (tools/goldens/families.py).
#include <cstring>
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

class FamilyTest : public testing::TestWithParam<const char*> {};

TEST_P(FamilyTest, Logits_EqualThoseOfTransformers) {
  const std::string folder = SourceFolder() + "/model/testdata/families/" + GetParam();
  const auto model = TestModel::Load(folder);
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

INSTANTIATE_TEST_SUITE_P(Checkpoints, FamilyTest,
                         testing::Values("yarn", "qwen3_moe", "qwen3_moe_mixed", "gemma3"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace carrel::model
