// Keys stored before RoPE, positions that attention gives, sparse prefill and needles, as users
// reach them: what works gives the same answers, what makes no sense is refused with the reason.
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

using BeyondTrainedTest = StoreTest;
using nlohmann::json;

constexpr char kSmall[] = "infinitehip:rows=64,sink=16,window=64,block_q=32";

Args Moved(const Args& more = {}) {
  Args args = {"--zone", "host", "--rope", "infinitehip"};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

TEST_F(BeyondTrainedTest, KeysBeforeRope_AnswerLikeKeysAfterIt_AndNothingElseReadsThem) {
  ASSERT_THAT(Carrel(Prefill("raw", {"--key-position", "none"})), Succeeds());
  const Outcome inspected = Carrel({"inspect", "raw", "--store", store_, "--json"});
  ASSERT_THAT(inspected, Succeeds());
  const json manifest = json::parse(inspected.out);
  EXPECT_EQ(manifest["key_position"], "none");
  EXPECT_EQ(manifest["prefill_attention"], "dense");
  EXPECT_EQ(manifest["head_statistics"], json::array());
  EXPECT_THAT(Carrel({"inspect", "raw", "--store", store_}), Succeeds());
  for (const char* method : {"exact", "hip", "infinitehip"}) {
    const Outcome answered = Carrel(Ask("raw", Moved({"--method", method})));
    ASSERT_THAT(answered, Succeeds());
    EXPECT_EQ(answered.out, Carrel(Ask(kKept)).out) << method;
  }
  // No layer attends to all rows unless it is asked for: they would share few positions.
  const auto top_k_of_first = [&](const Args& args) {
    const Outcome answered = Carrel(Ask("raw", args));
    EXPECT_THAT(answered, Succeeds());
    return json::parse(answered.out)["stats"]["layers"][0]["top_k"];
  };
  EXPECT_EQ(top_k_of_first(Moved({"--top-k", "16", "--json"})), 16);
  EXPECT_EQ(top_k_of_first(Moved({"--top-k", "16", "--json", "--dense-layers", "1"})), "all");
  // Rows in which nobody may see keys after RoPE, and the other way round.
  const Texts differs = {"key_position", "none", "after_rope"};
  EXPECT_THAT(Carrel(Ask("raw")), FailsWith(1, differs));
  EXPECT_THAT(Carrel(Ask("raw", {"--zone", "host"})), FailsWith(1, differs));
  EXPECT_THAT(Carrel(Ask(kKept, Moved())), FailsWith(1, differs));
  EXPECT_THAT(Carrel({"audit", "raw", "--store", store_}), FailsWith(1, Texts{"key_position"}));
  EXPECT_THAT(Carrel({"reindex", "raw", "--as", "new", "--index", "code", "--store", store_}),
              FailsWith(1, Texts{"raw", "before RoPE"}));
  EXPECT_THAT(
      Carrel({"synth", "--like", "raw", "--store", store_, "--name", "new", "--tokens", "1000"}),
      FailsWith(1, Texts{"raw", "key_position=none"}));
}

TEST_F(BeyondTrainedTest, WhatMakesNoSense_IsRefused) {
  const Args none = {"--key-position", "none"};
  const auto prefill = [&](const Args& more) {
    Args args = none;
    args.insert(args.end(), more.begin(), more.end());
    return Carrel(Prefill("new", args));
  };
  EXPECT_THAT(prefill({"--index", "code"}), FailsWith(2, Texts{"needs index=flat"}));
  EXPECT_THAT(prefill({"--summaries", "40"}), FailsWith(2, Texts{"summaries=40"}));
  EXPECT_THAT(prefill({"--rope", "infinitehip"}), FailsWith(2, Texts{"not dense"}));
  EXPECT_THAT(prefill({"--attention", "hip:rows=1"}), FailsWith(2, Texts{"rows=1 is outside"}));
  EXPECT_THAT(prefill({"--attention", "flash"}), FailsWith(2, Texts{"attention=flash"}));
  EXPECT_THAT(prefill({"--rope", "yarn"}), FailsWith(2, Texts{"rope=yarn"}));
  EXPECT_THAT(Carrel(Prefill("new", {"--key-position", "some"})),
              FailsWith(2, Texts{"key_position=some"}));
  EXPECT_THAT(Carrel(Prefill("new", {"--rope", "infinitehip", "--attention", kSmall})),
              FailsWith(2, Texts{"needs key_position=none"}));
  EXPECT_THAT(Carrel(Ask(kKept, {"--rope", "infinitehip"})), FailsWith(2, Texts{"zone=host"}));
  EXPECT_THAT(Carrel(Ask(kKept, Moved({"--method", "hash"}))),
              FailsWith(2, Texts{"method=hash", "keys after RoPE"}));
  EXPECT_THAT(Carrel(Ask(kKept, Moved({"--beyond-trained"}))),
              FailsWith(2, Texts{"beyond_trained"}));
  ExpectNothingLost();
}

TEST_F(BeyondTrainedTest, LongerThanTheModelWasTrainedFor_GoesByPositionsOfItsOwn) {
  ModelCopy model(path("model"));
  model.EditJson("config.json", [](auto& config) { config["max_position_embeddings"] = 100; });
  const Args by_model = {"--model", path("model")};
  const auto with = [&](Args args) {
    args.insert(args.end(), by_model.begin(), by_model.end());
    return args;
  };
  EXPECT_THAT(Carrel(Prefill("long", by_model)),
              FailsWith(2, Texts{"max_position_embeddings=100"}));
  ASSERT_THAT(
      Carrel(Prefill("long", with({"--rope", "infinitehip", "--key-position", "none", "--attention",
                                   "infinitehip:rows=16,sink=8,window=16,block_q=32"}))),
      Succeeds());
  for (const char* top_k : {"16", "all"}) {  // all: the earliest rows share a position
    EXPECT_THAT(Carrel(Ask("long", with(Moved({"--top-k", top_k})))), Succeeds());
  }
  ASSERT_THAT(Carrel(Prefill("far", with({"--beyond-trained"}))), Succeeds());
  EXPECT_THAT(Carrel(Ask("far", by_model)), FailsWith(2, Texts{"max_position_embeddings=100"}));
  EXPECT_THAT(Carrel(Ask("far", with({"--beyond-trained"}))), Succeeds());
}

TEST_F(BeyondTrainedTest, SparsePrefill_IsInTheManifest) {
  ASSERT_THAT(Carrel(Prefill("sparse", {"--attention", kSmall})), Succeeds());
  const json manifest = json::parse(Carrel({"inspect", "sparse", "--store", store_, "--json"}).out);
  EXPECT_EQ(manifest["prefill_attention"],
            "infinitehip:block_q=32,rows=64,sink=16,stride_q=4,window=64");
  EXPECT_EQ(manifest["prefill_rope"], "trained");
  EXPECT_THAT(Carrel(Ask("sparse")), Succeeds());
}

TEST_F(BeyondTrainedTest, Needle_WritesDocumentsThatEvalMaps) {
  const Outcome made = Carrel({"needle", "--model", DemoModel(), "--out", path("needles"),
                               "--lengths", "700,1500", "--depths", "0.1,0.9", "--json"});
  ASSERT_THAT(made, Succeeds());
  const json documents = json::parse(made.out);
  ASSERT_EQ(documents.size(), 2u);
  for (const json& document : documents) {
    EXPECT_EQ(document["questions"], 2);
    EXPECT_GE(document["tokens"], document["length"]);
    EXPECT_LT(document["tokens"].get<int>(), document["length"].get<int>() + 40);
    ASSERT_THAT(Carrel(Prefill("n" + document["length"].dump(),
                               {"--input", document["document"].get<std::string>()})),
                Succeeds());
  }
  const std::string questions = documents[0]["questions_file"];
  const Args eval = {"eval",      "--model", DemoModel(),   "--store", store_,
                     "--context", "n700",    "--questions", questions};
  Args both = eval;
  both.insert(both.end(), {"--also", "n1500=" + documents[1]["questions_file"].get<std::string>()});
  const Outcome evaluated = Carrel(both);
  ASSERT_THAT(evaluated, Succeeds());
  EXPECT_THAT(evaluated.err, testing::HasSubstr("| single: depth | 700 tokens | 1500 tokens |"));
  const json report = json::parse(evaluated.out);
  EXPECT_EQ(report["questions"], 4);
  EXPECT_EQ(report["contexts"].size(), 2u);
  ASSERT_EQ(report["needles"].size(), 4u);
  int64_t exact = 0;
  for (const json& cell : report["needles"]) {
    EXPECT_EQ(cell["asked"], 1);
    exact += cell["right"].get<int64_t>();
  }
  EXPECT_EQ(report["exact_matches"], exact);
  Args wrong = eval;
  wrong.insert(wrong.end(), {"--also", "n1500"});
  EXPECT_THAT(Carrel(wrong), FailsWith(2, Texts{"also=n1500", "CONTEXT=FILE"}));
  EXPECT_THAT(Carrel({"needle", "--model", DemoModel(), "--out", path("needles"), "--lengths",
                      "700", "--kinds", "triple"}),
              FailsWith(2, Texts{"kind=triple"}));
  const std::string torn =
      WriteFile("torn.jsonl", json{{"prompt", "a"}, {"answer", "b"}, {"depth", 1}}.dump());
  EXPECT_THAT(Carrel({"eval", "--model", DemoModel(), "--store", store_, "--context", "n700",
                      "--questions", torn}),
              FailsWith(2, Texts{"torn.jsonl:1", "kind"}));
}

}  // namespace
}  // namespace carrel::cli
