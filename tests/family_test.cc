// Tiny checkpoints of the families, end to end: a document's rows from prefill, a prompt by ask, and
// logits as transformers has them (tools/goldens/families.py).
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/test_folders.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

using nlohmann::json;

std::vector<float> Floats(absl::string_view bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

void ExpectLogitsOfTransformers(const std::string& model, const TensorFile& golden, double most) {
  const std::string folder = FreshTempDir();
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
    EXPECT_EQ(logits.size(), (ids.size() - split) * 64);
    // The reference may have the last tokens' alone.
    const auto tail = static_cast<int64_t>(std::min(logits.size(), all.size()));
    const std::vector<float> got(logits.end() - tail, logits.end());
    const std::vector<float> expected(all.end() - tail, all.end());
    EXPECT_LE(RelativeError(got, expected), most);  // the document's rows are bf16
  }
}

class FamilyTest : public testing::TestWithParam<const char*> {};

TEST_P(FamilyTest, PrefillAndAsk_GiveTheLogitsOfTransformers) {
  const std::string model = SourceFolder() + "/model/testdata/families/" + GetParam();
  ExpectLogitsOfTransformers(model, TensorFile::Read(model + "/golden.safetensors"), 2e-2);
}

// Models with the fields that they are published with (tools/goldens/published.py).
class PublishedTest : public testing::TestWithParam<const char*> {};

TEST_P(PublishedTest, FolderAndGguf_GiveTheLogitsOfTransformers) {
  const std::string folder = SourceFolder() + "/model/testdata/published/" + GetParam();
  const TensorFile golden = TensorFile::Read(folder + "/golden.safetensors");
  for (const std::string& model : {folder, folder + "/model.gguf"}) {
    SCOPED_TRACE(model);
    ExpectLogitsOfTransformers(model, golden, 5e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, PublishedTest,
                         testing::Values("llama-3.1-8b", "gemma-3-1b", "qwen3-coder-30b-a3b",
                                         "deepseek-r1-0528-qwen3-8b", "mistral-7b-v0.1"),
                         [](const auto& info) {
                           return absl::StrReplaceAll(info.param, {{"-", "_"}, {".", "_"}});
                         });

// Layers see a window of 96 tokens: up to it, attention over all of them is the model's.
TEST(WindowTest, BeyondAWindowThatIsNotRun_IsRefusedWithBothNumbers) {
  const std::string folder = SourceFolder() + "/model/testdata/published/mistral-7b-v0.1";
  const std::string scratch = FreshTempDir();
  const auto ids = [&](const std::string& name, int count) {
    const std::string path = scratch + "/" + name;
    WriteBytes(path, json(std::vector<int32_t>(static_cast<size_t>(count), 5)).dump());
    return path;
  };
  for (const std::string& model : {folder, folder + "/model.gguf"}) {
    SCOPED_TRACE(model);
    const std::string store = FreshTempDir();
    const auto prefill = [&](int tokens, const Args& more) {
      return Carrel(With({"prefill", "--model", model, "--tokens", ids("d.json", tokens), "--store",
                          store, "--name", absl::StrCat("d", tokens), "--quiet"},
                         more));
    };
    const auto ask = [&](int tokens, const Args& more) {
      return Carrel(With({"ask", "--model", model, "--store", store, "--context", "d90",
                          "--prompt-tokens", ids("p.json", tokens), "--ignore-eos", "--json"},
                         more));
    };
    ASSERT_THAT(prefill(90, {}), Succeeds());
    for (const Args& more : {Args{}, Args{"--lab", "beyond-trained"}}) {
      EXPECT_THAT(prefill(97, more), FailsWith(2, Texts{"97 tokens", "sliding_window=96", "512"}));
      EXPECT_THAT(ask(7, more),
                  FailsWith(2, Texts{"90 and prompt of 7", "sliding_window=96", "512"}));
      // The answer ends where the window does.
      const Outcome answer = ask(3, With({"--max-tokens", "50"}, more));
      ASSERT_THAT(answer, Succeeds());
      EXPECT_EQ(JsonOf(answer)["stop"], "context_length");
    }
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
