// The demo model as GGUF files, in place of its folder: the same answers, the same refusals.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "common/bf16.h"
#include "tests/cli_world.h"
#include "tests/demo_gguf.h"

namespace carrel::cli {
namespace {

using kernels::GgufType;
using model::GgufWriter;

constexpr int kBad = 2;
constexpr int kFailed = 1;
class GgufModelTest : public StoreTest {
 protected:
  std::string Write(const GgufWriter& writer, const std::string& name) const {
    return WriteFile(name, writer.Bytes());
  }
};

TEST_F(GgufModelTest, SameWeightsInBf16_GiveTheFoldersRowsAndAnswer) {
  const std::string file = Write(DemoGguf(GgufType::kBf16), "demo.gguf");
  const Outcome prefill = Carrel(Prefill("from-gguf", {"--model", file, "--json"}));
  ASSERT_THAT(prefill, Succeeds());
  EXPECT_EQ(JsonOf(prefill)["tokens"], kept_tokens_);
  const Outcome asked = Carrel(Ask("from-gguf", {"--model", file}));
  ASSERT_THAT(asked, Succeeds());
  EXPECT_EQ(asked.out, answer_);
}

TEST_F(GgufModelTest, BlocksOfEightBits_AnswerTheQuestion) {
  const std::string file = Write(DemoGguf(GgufType::kQ8_0), "demo.gguf");
  ASSERT_THAT(Carrel(Prefill("from-gguf", {"--model", file})), Succeeds());
  const Outcome asked = Carrel(Ask("from-gguf", {"--model", file}));
  ASSERT_THAT(asked, Succeeds());
  EXPECT_EQ(asked.out, answer_);
}

TEST_F(GgufModelTest, BlocksMadeFromTheContextsWeights_AskItWithTheFlagAlone) {
  const std::string file = Write(DemoGguf(GgufType::kQ8_0), "demo.gguf");
  const Args with_file = {"--model", file};
  EXPECT_THAT(Carrel(Ask(kKept, with_file)), FailsWith(kFailed, Texts{"weights_sha256"}));
  const Outcome asked = Carrel(Ask(kKept, {"--model", file, "--weights", "derived", "--json"}));
  ASSERT_THAT(asked, Succeeds());
  EXPECT_THAT(asked.err, testing::HasSubstr("weights: made from those of the context"));
  const nlohmann::json said = JsonOf(asked);
  EXPECT_EQ(said["text"].get<std::string>() + "\n", answer_);
  EXPECT_EQ(said["weights_derived"]["matrices"], 57);
  EXPECT_EQ(said["weights_derived"]["beyond"], 0);
  const auto manifest = JsonOf(Carrel({"inspect", kKept, "--store", store_, "--json"}));
  EXPECT_EQ(said["weights_derived"]["of_weights_sha256"],
            manifest["fingerprint"]["weights_sha256"]);
  EXPECT_EQ(manifest["weights_probe"]["values"], said["weights_derived"]["values"]);
  // The context's own weights need no flag, and are none with it.
  EXPECT_EQ(Carrel(Ask(kKept, {"--weights", "derived"})).out, answer_);
  EXPECT_THAT(Carrel(Ask(kKept, {"--weights", "any"})), FailsWith(kBad, Texts{"weights=any"}));
}

// A change that eight bits would round away, of every matrix or of one kind, is another model.
TEST_F(GgufModelTest, BlocksOfAnotherFineTune_AreRefusedByTheSampledWeights) {
  const std::string file = Write(DemoGguf(GgufType::kQ8_0), "demo.gguf");
  for (const std::string of : {"", "v_proj"}) {
    SCOPED_TRACE(of);
    ModelCopy tuned(path("tuned" + of));
    tuned.EditWeights([&](TensorFile& weights) {
      std::mt19937_64 rng(TestSeed());
      std::normal_distribution<float> normal(0, 0.02f);
      for (const auto& [name, entry] : weights.header.items()) {
        if (name == "__metadata__" || entry["shape"].size() != 2) continue;
        if (!absl::StrContains(name, of)) continue;
        for (size_t at = entry["data_offsets"][0]; at < entry["data_offsets"][1]; at += 2) {
          uint16_t bits;
          std::memcpy(&bits, &weights.data[at], 2);
          bits = FloatToBf16(Bf16ToFloat(bits) * (1 + normal(rng)));
          std::memcpy(&weights.data[at], &bits, 2);
        }
      }
    });
    const std::string name = "tuned" + of;
    ASSERT_THAT(Carrel(Prefill(name, {"--model", tuned.folder()})), Succeeds());
    EXPECT_THAT(Carrel(Ask(name, {"--model", file, "--weights", "derived"})),
                FailsWith(kFailed, Texts{"weights=derived", "were not made from those"}));
    // Nor are plain ones.
    EXPECT_THAT(Carrel(Ask(name, {"--weights", "derived"})),
                FailsWith(kFailed, Texts{"weights=derived", "were not made from those"}));
  }
  // A context of blocks has nothing to show.
  ASSERT_THAT(Carrel(Prefill("blocks", {"--model", file})), Succeeds());
  EXPECT_THAT(Carrel(Ask("blocks", {"--weights", "derived"})),
              FailsWith(kFailed, Texts{"holds no sampled weights"}));
}

TEST_F(GgufModelTest, PartsOfASplitFile_AreOneModel) {
  GgufWriter first = DemoMetadata(), second;
  GgufWriter whole = DemoGguf(GgufType::kBf16);
  whole.MoveTensors(5, first);
  whole.MoveTensors(-1, second);
  int i = 0;
  for (GgufWriter* part : {&first, &second}) {
    part->U16("split.no", static_cast<uint16_t>(i)).U16("split.count", 2);
    Write(*part, absl::StrCat("demo-0000", ++i, "-of-00002.gguf"));
  }
  for (const char* named : {"demo-00001-of-00002.gguf", "demo-00002-of-00002.gguf"}) {
    const Outcome prefill = Carrel(Prefill(named, {"--model", path(named)}));
    ASSERT_THAT(prefill, Succeeds());
    const Outcome asked = Carrel(Ask(named, {"--model", path("demo-00001-of-00002.gguf")}));
    ASSERT_THAT(asked, Succeeds());
    EXPECT_EQ(asked.out, answer_);
  }
}

TEST_F(GgufModelTest, ContextOfTheFolder_IsRefused) {
  const std::string file = Write(DemoGguf(GgufType::kBf16), "demo.gguf");
  EXPECT_THAT(Carrel(Ask(kKept, {"--model", file})),
              FailsWith(kFailed, Texts{"FAILED_PRECONDITION", "weights_sha256"}));
  ExpectNothingLost();
}

TEST_F(GgufModelTest, BadFiles_AreNamed) {
  const auto expect_refused = [&](const std::string& bytes, const Texts& message) {
    const std::string file = WriteFile("bad.gguf", bytes);
    Texts texts = message;
    texts.push_back(file);
    EXPECT_THAT(Carrel(Prefill("new", {"--model", file})), FailsWith(kBad, texts));
    EXPECT_THAT(Carrel(Ask(kKept, {"--model", file})), FailsWith(kBad, texts));
  };
  const GgufWriter good = DemoGguf(GgufType::kBf16);
  const std::string whole = good.Bytes();
  expect_refused("", {"not a GGUF file"});
  expect_refused(whole.substr(0, whole.size() / 2), {"truncated"});
  expect_refused(GgufWriter(good).U32("tokenizer.ggml.bos_token_id", 5000).Bytes(), {"=5000"});
  expect_refused(GgufWriter(good).DropTensor("blk.3.attn_v.weight").Bytes(),
                 {"\"blk.3.attn_v.weight\" is missing"});
  EXPECT_THAT(Carrel(Prefill("new", {"--model", path("none.gguf")})),
              FailsWith(kFailed, Texts{"NOT_FOUND", path("none.gguf")}));
  const std::string other =
      Write(GgufWriter(good).String("general.architecture", "mamba"), "other.gguf");
  EXPECT_THAT(Carrel(Prefill("new", {"--model", other})),
              FailsWith(kFailed, Texts{"UNIMPLEMENTED", "mamba", other}));
  // A folder into which they were downloaded is not what one reads.
  std::filesystem::create_directory(path("downloads"));
  const std::string downloaded = WriteFile("downloads/demo.gguf", whole);
  EXPECT_THAT(
      Carrel(Prefill("new", {"--model", path("downloads")})),
      FailsWith(kBad, Texts{"has no config.json, but GGUF files: give one of them", downloaded}));
  ExpectNothingLost();
}

}  // namespace
}  // namespace carrel::cli
