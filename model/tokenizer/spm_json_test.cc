// tokenizer.json of SentencePiece's kind, without a tokenizer.model beside it.
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "common/file.h"
#include "common/status.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/tokenizer/tokenizer_test_util.h"

namespace carrel::model {
namespace {

using nlohmann::json;
using Code = absl::StatusCode;

const json& Goldens() {
  static const auto* const goldens = [] {
    const auto text = ReadFile(SourceFolder() + "/model/testdata/spm_json.json");
    CARREL_CHECK(text.ok());
    return new json(json::parse(*text));
  }();
  return *goldens;
}

// A tokenizer.json of one of its cases; `edit` is a JSON merge patch.
std::string FileOf(const std::string& name, const std::string& edit = "{}") {
  json whole = Goldens()["cases"][name]["parts"];
  whole["model"]["vocab"] = Goldens()["vocab"];
  whole["model"]["merges"] = Goldens()["merges"];
  whole.merge_patch(json::parse(edit));
  return whole.dump();
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& name,
                                                const std::string& edit = "{}") {
  return LoadFiles({{"tokenizer.json", FileOf(name, edit)}});
}

// tools/goldens/spm_json.py.
TEST(SpmJson, EveryKind_GivesIdsAndTextOfThePythonPackage) {
  EXPECT_EQ(Goldens()["cases"].size(), 5u);
  for (const auto& [name, golden] : Goldens()["cases"].items()) {
    const auto tokenizer = Load(name);
    CARREL_ASSERT_OK(tokenizer);
    for (size_t i = 0; i < Goldens()["texts"].size(); ++i) {
      const std::string text = Goldens()["texts"][i], decoded = golden["decoded"][i];
      Tokenizer::Dropped dropped;
      const auto ids = (*tokenizer)->Encode(text, &dropped);
      CARREL_ASSERT_OK(ids);
      EXPECT_EQ(*ids, golden["ids"][i].get<std::vector<TokenId>>()) << name << ": " << text;
      EXPECT_TRUE(name == "plain" || dropped.bytes == 0) << text;
      EXPECT_EQ(*(*tokenizer)->Decode(*ids, false), decoded) << name << ": " << text;
      StreamDecoder stream(tokenizer->get(), false);
      std::string streamed;
      for (const TokenId id : *ids) streamed += *stream.Push(id);
      EXPECT_EQ(streamed + *stream.Finish(), decoded) << name << ": " << text;
    }
  }
}

TEST(SpmJson, TokenizerModelBesideIt_Decides) {
  const std::string model = SmallSentencePieceModel({"\u2581hello"});
  const auto alone = LoadFiles({{"tokenizer.model", model}});
  const auto both = LoadFiles({{"tokenizer.model", model}, {"tokenizer.json", FileOf("legacy")}});
  CARREL_ASSERT_OK(alone);
  CARREL_ASSERT_OK(both);
  EXPECT_EQ((*both)->sha256(), (*alone)->sha256());
}

TEST(SpmJson, BytesWithoutAToken_AreNamedWithTheirPlace) {
  const auto tokenizer = Load("plain");
  CARREL_ASSERT_OK(tokenizer);
  EXPECT_THAT((*tokenizer)->Encode("hello \u65E5"), StatusIs(Code::kInvalidArgument, "byte 0xe6"));
}

TEST(SpmJson, WhatIsNotRun_IsNamed) {
  const auto error = [](const std::string& name, const std::string& edit) {
    return Load(name, edit).status();
  };
  EXPECT_THAT(error("legacy", R"({"model": {"type": "Unigram"}})"),
              StatusIs(Code::kUnimplemented, "model.type \"Unigram\""));
  EXPECT_THAT(error("legacy", R"({"normalizer": {"type": "Lowercase", "normalizers": null}})"),
              StatusIs(Code::kUnimplemented, "normalizer"));
  EXPECT_THAT(error("gemma", R"({"normalizer": {"pattern": {"String": null, "Regex": " +"}}})"),
              StatusIs(Code::kUnimplemented, "normalizer"));
  EXPECT_THAT(error("legacy",
                    R"({"normalizer": {"type": "Prepend", "prepend": "x", "normalizers": null}})"),
              StatusIs(Code::kUnimplemented, "normalizer"));
  EXPECT_THAT(error("llama", R"({"pre_tokenizer": {"replacement": "_"}})"),
              StatusIs(Code::kUnimplemented, "pre_tokenizer"));
  EXPECT_THAT(error("llama", R"({"pre_tokenizer": {"prepend_scheme": "last"}})"),
              StatusIs(Code::kUnimplemented, "prepend_scheme last"));
  EXPECT_THAT(error("llama", R"({"decoder": {"type": "Metaspace", "decoders": null}})"),
              StatusIs(Code::kUnimplemented, "decoder"));
}

// Wherever such a text is cut in two, the rest is the same.
TEST(SpmJson, RandomText_DecodesToItself) {
  std::mt19937_64 rng(TestSeed());
  for (const char* name : {"legacy", "llama", "gemma"}) {
    const auto tokenizer = Load(name);
    CARREL_ASSERT_OK(tokenizer);
    for (int round = 0; round < 100; ++round) {
      const std::string text = RandomUtf8(rng, static_cast<int64_t>(rng() % 80));
      if (absl::StrContains(text, "\u2581")) continue;
      const auto ids = (*tokenizer)->Encode(text);
      CARREL_ASSERT_OK(ids);
      if (std::string(name) == "llama" && text.starts_with(" "))
        continue;  // it puts none before it
      EXPECT_EQ(*(*tokenizer)->Decode(*ids, false), text) << name;
    }
  }
}

}  // namespace
}  // namespace carrel::model
