// Tiny checkpoints of the families, end to end: a document's rows from prefill, a prompt by ask, and
// logits as transformers has them (tools/goldens/families.py).
#include <cmath>
#include <cstring>

#include "common/test_folders.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

using nlohmann::json;

class FamilyTest : public testing::TestWithParam<const char*> {};

std::vector<float> Floats(absl::string_view bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

TEST_P(FamilyTest, PrefillAndAsk_GiveTheLogitsOfTransformers) {
  const std::string model = SourceFolder() + "/model/testdata/families/" + GetParam();
  const std::string folder = FreshTempDir();
  const TensorFile golden = TensorFile::Read(model + "/golden.safetensors");
  std::vector<int32_t> ids(golden.Tensor("input_ids").size() / sizeof(int32_t));
  std::memcpy(ids.data(), golden.Tensor("input_ids").data(), ids.size() * sizeof(int32_t));
  const size_t split = ids.size() * 7 / 10;
  WriteBytes(folder + "/document.json", json(std::vector(ids.begin(), ids.begin() + split)).dump());
  WriteBytes(folder + "/prompt.json", json(std::vector(ids.begin() + split, ids.end())).dump());
  ASSERT_THAT(Carrel({"prefill", "--model", model, "--tokens", folder + "/document.json", "--store",
                      folder + "/store", "--name", "d", "--quiet"}),
              Succeeds());
  for (const Args& zone : {Args{}, Args{"--zone", "host"}}) {
    ASSERT_THAT(
        Carrel(With({"ask", "--model", model, "--context", "d", "--store", folder + "/store",
                     "--top-k", "all", "--sink", "2", "--local", "4", "--max-tokens", "1",
                     "--prompt-tokens", folder + "/prompt.json", "--logits", folder + "/logits"},
                    zone)),
        Succeeds());
    const TensorFile out = TensorFile::Read(folder + "/logits");
    const std::vector<float> logits = Floats(out.Tensor("logits"));
    const std::vector<float> all = Floats(golden.Tensor("logits"));
    const std::vector<float> expected(all.end() - static_cast<int64_t>(logits.size()), all.end());
    EXPECT_EQ(logits.size(), (ids.size() - split) * 64);
    EXPECT_LE(RelativeError(logits, expected), 2e-2);  // the document's rows are bf16
  }
}

// Layers with a window ask for no rows, and the plan of a fidelity counts none for them.
TEST(SlidingTest, LayersWithAWindow_AskForNothing) {
  const std::string model = SourceFolder() + "/model/testdata/families/gemma3";
  const std::string folder = FreshTempDir();
  const TensorFile golden = TensorFile::Read(model + "/golden.safetensors");
  std::vector<int32_t> ids(golden.Tensor("input_ids").size() / sizeof(int32_t));
  std::memcpy(ids.data(), golden.Tensor("input_ids").data(), ids.size() * sizeof(int32_t));
  WriteBytes(folder + "/document.json", json(ids).dump());
  WriteBytes(folder + "/prompt.json", json(std::vector<int32_t>{5, 6, 7}).dump());
  const Args prefill = {
      "prefill", "--model",         model,    "--tokens", folder + "/document.json",
      "--store", folder + "/store", "--name", "d",        "--quiet"};
  EXPECT_THAT(Carrel(With(prefill, {"--attention", "hip"})),
              FailsWith(1, Texts{"UNIMPLEMENTED", "sliding window"}));
  ASSERT_THAT(Carrel(prefill), Succeeds());
  const Args ask = {"ask",
                    "--model",
                    model,
                    "--context",
                    "d",
                    "--store",
                    folder + "/store",
                    "--sink",
                    "2",
                    "--local",
                    "4",
                    "--max-tokens",
                    "8",
                    "--ignore-eos",
                    "--prompt-tokens",
                    folder + "/prompt.json",
                    "--json"};
  for (const Args& more : {Args{}, Args{"--zone", "host"}, Args{"--prefetch", "verified"},
                           Args{"--want", "rows", "--top-k", "16"}}) {
    const json layers = JsonOf(Carrel(With(ask, more)))["stats"]["layers"];
    ASSERT_EQ(layers.size(), 4u);
    for (const size_t i : {0u, 2u}) EXPECT_EQ(layers[i]["rows_attended"], 0) << i;
    for (const size_t i : {1u, 3u}) EXPECT_GT(layers[i]["rows_attended"], 0) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, FamilyTest,
                         testing::Values("yarn", "qwen3_moe", "qwen3_moe_mixed", "gemma3"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace carrel::cli
