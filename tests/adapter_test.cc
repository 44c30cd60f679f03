// LoRA adapters: --adapter on every command that runs a model, and what it makes of a context.
#include <filesystem>
#include <random>

#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

using nlohmann::json;

class AdapterTest : public StoreTest {
 protected:
  static constexpr int kRank = 2;

  // An adapter to the demo model's queries, in every layer.
  void WriteAdapter(const std::string& name, float deviation, uint64_t seed = 1) {
    const std::string folder = path(name);
    std::filesystem::create_directories(folder);
    TensorFile file;
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal(0.0f, deviation);
    for (int layer = 0; layer < 8; ++layer) {
      for (const auto& [half, out, in] : {std::tuple{"A", kRank, 256}, {"B", 512, kRank}}) {
        const size_t begin = file.data.size();
        for (int i = 0; i < out * in; ++i) {
          const float x = normal(rng);
          file.data.append(reinterpret_cast<const char*>(&x), sizeof(x));
        }
        file.header[absl::StrCat("base_model.model.model.layers.", layer, ".self_attn.q_proj.lora_",
                                 half, ".weight")] = {
            {"dtype", "F32"}, {"shape", {out, in}}, {"data_offsets", {begin, file.data.size()}}};
      }
    }
    file.Write(folder + "/adapter_model.safetensors");
    WriteBytes(
        folder + "/adapter_config.json",
        json{{"peft_type", "LORA"}, {"r", kRank}, {"lora_alpha", 4}, {"target_modules", {"q_proj"}}}
            .dump());
  }
};

TEST_F(AdapterTest, Context_BelongsToModelAndAdapter) {
  WriteAdapter("a", 0.2f);
  WriteAdapter("b", 0.2f, 2);
  const Args with_a = {"--adapter", path("a")}, with_b = {"--adapter", path("b")};
  ASSERT_THAT(Carrel(Prefill("adapted", with_a)), Succeeds());
  const json manifest = JsonOf(Carrel({"inspect", "adapted", "--store", store_, "--json"}));
  const json kept = JsonOf(Carrel({"inspect", kKept, "--store", store_, "--json"}));
  EXPECT_EQ(manifest["fingerprint"]["adapter_sha256"].get<std::string>().size(), 64u);
  EXPECT_EQ(manifest["fingerprint"]["weights_sha256"], kept["fingerprint"]["weights_sha256"]);
  EXPECT_FALSE(kept["fingerprint"].contains("adapter_sha256"));
  EXPECT_THAT(Carrel(Ask("adapted", with_a)), Succeeds());
  const Texts differs = {"FAILED_PRECONDITION", "adapter_sha256"};
  EXPECT_THAT(Carrel(Ask("adapted")), FailsWith(1, differs));
  EXPECT_THAT(Carrel(Ask("adapted", with_b)), FailsWith(1, differs));
  EXPECT_THAT(Carrel(Ask(kKept, with_a)), FailsWith(1, differs));
  EXPECT_EQ(Carrel(Ask(kKept)).out, answer_);
}

TEST_F(AdapterTest, Eval_WithTheAdapter_AsksTheContext) {
  WriteAdapter("a", 0.2f);
  ASSERT_THAT(Carrel(Prefill("adapted", {"--adapter", path("a")})), Succeeds());
  const std::string questions = WriteFile(
      "questions.jsonl", json{{"prompt", kQuestion}, {"answer", "no such thing"}}.dump() + "\n");
  Args eval = {"eval",   "--model", DemoModel(), "--context",   "adapted", "--store",      store_,
               "--json", "--top-k", "all",       "--questions", questions, "--max-tokens", "4"};
  EXPECT_THAT(Carrel(eval), FailsWith(1, Texts{"adapter_sha256"}));
  EXPECT_EQ(JsonOf(Carrel(With(eval, {"--adapter", path("a")})))["questions"], 1);
  // Of configurations each may name one.
  const std::string list = WriteFile(
      "compare.json", json::array({{{"name", "x"}, {"adapter", path("a")}, {"top-k", 16}}}).dump());
  EXPECT_THAT(Carrel(With(eval, {"--compare", list, "--measure", "0"})), Succeeds());
}

TEST_F(AdapterTest, WithoutAContext_ChangesWhatTheModelSays) {
  WriteAdapter("a", 0.2f);
  WriteAdapter("nothing", 0.0f);
  const Args ask = {"ask", "--model", DemoModel(), "--json", "--max-tokens", "8", "The registry"};
  const json plain = JsonOf(Carrel(ask))["ids"];
  EXPECT_EQ(JsonOf(Carrel(With(ask, {"--adapter", path("nothing")})))["ids"], plain);
  EXPECT_NE(JsonOf(Carrel(With(ask, {"--adapter", path("a")})))["ids"], plain);
}

TEST_F(AdapterTest, AdapterInTheModelsFolder_IsRefusedNotIgnored) {
  WriteAdapter("a", 0.2f);
  ModelCopy model(path("model"));
  std::filesystem::copy(path("a/adapter_config.json"), model.path("adapter_config.json"));
  const Texts message = {model.folder(), "adapter_config.json", "--adapter"};
  EXPECT_THAT(Carrel(Prefill("new", {"--model", model.folder()})), FailsWith(2, message));
  EXPECT_THAT(Carrel(Ask(kKept, {"--model", model.folder()})), FailsWith(2, message));
  std::filesystem::copy(path("a/adapter_model.safetensors"),
                        model.path("adapter_model.safetensors"));
  EXPECT_THAT(Carrel(Prefill("new", {"--model", model.folder(), "--adapter", model.folder()})),
              Succeeds());
  EXPECT_THAT(Carrel(Ask("new", {"--adapter", path("a")})), Succeeds());  // the same adapter
}

TEST_F(AdapterTest, BadAdapter_IsNamed) {
  EXPECT_THAT(Carrel(Prefill("new", {"--adapter", path("nowhere")})),
              FailsWith(1, Texts{"NOT_FOUND", path("nowhere")}));
  WriteAdapter("a", 0.2f);
  std::filesystem::remove(path("a/adapter_model.safetensors"));
  EXPECT_THAT(Carrel(Ask(kKept, {"--adapter", path("a")})),
              FailsWith(1, Texts{"NOT_FOUND", "adapter_model.safetensors"}));
  WriteAdapter("a", 0.2f);
  json config = json::parse(ReadBytes(path("a/adapter_config.json")));
  config["use_dora"] = true;
  WriteBytes(path("a/adapter_config.json"), config.dump());
  EXPECT_THAT(Carrel(Prefill("new", {"--adapter", path("a")})),
              FailsWith(1, Texts{"UNIMPLEMENTED", "use_dora"}));
  ExpectNothingLost();
}

}  // namespace
}  // namespace carrel::cli
