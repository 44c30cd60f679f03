#include "model/generation_defaults.h"

#include <fstream>

#include "common/test_util.h"
#include "model/gguf_writer.h"

namespace carrel::model {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Code = absl::StatusCode;

absl::StatusOr<GenerationDefaults> OfFolder(const std::string& generation_config) {
  const std::string folder = FreshTempDir();
  std::ofstream(folder + "/generation_config.json", std::ios::binary) << generation_config;
  return LoadGenerationDefaults(folder);
}

absl::StatusOr<GenerationDefaults> OfGguf(const GgufWriter& writer) {
  return LoadGenerationDefaults(WriteGguf(writer.Bytes()));
}

TEST(GenerationDefaultsTest, FolderAndGguf_SayTheSame) {
  const auto folder = OfFolder(R"({"do_sample": true, "temperature": 0.7, "top_p": 0.8,
      "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05, "eos_token_id": [1, 2]})");
  GgufWriter writer;
  writer.F32("general.sampling.temp", 0.7f).F32("general.sampling.top_p", 0.8f);
  writer.U32("general.sampling.top_k", 20).F32("general.sampling.min_p", 0.05f);
  writer.F32("general.sampling.penalty_repeat", 1.05f);
  const auto gguf = OfGguf(writer);
  for (const auto* advice : {&folder, &gguf}) {
    CARREL_ASSERT_OK(*advice);
    EXPECT_EQ((*advice)->temperature, 0.7);
    EXPECT_EQ((*advice)->top_p, 0.8);
    EXPECT_EQ((*advice)->top_k, 20);
    EXPECT_EQ((*advice)->min_p, 0.05);
    EXPECT_EQ((*advice)->repetition_penalty, 1.05);
    EXPECT_EQ((*advice)->samples(), true);
    EXPECT_THAT((*advice)->ignored, IsEmpty());
  }
  EXPECT_THAT(folder->source, HasSubstr("generation_config.json"));
  EXPECT_THAT(gguf->source, HasSubstr(".gguf"));
}

TEST(GenerationDefaultsTest, NothingSaid_IsNothing) {
  const auto none = LoadGenerationDefaults(FreshTempDir());
  for (const auto& advice : {none, OfFolder(R"({"eos_token_id": 2, "temperature": null})"),
                             OfGguf(GgufWriter().U32("general.quantization_version", 2))}) {
    CARREL_ASSERT_OK(advice);
    EXPECT_EQ(advice->source, "");
    EXPECT_EQ(advice->samples(), std::nullopt);
    EXPECT_FALSE(advice->temperature.has_value() || advice->top_k.has_value());
  }
}

TEST(GenerationDefaultsTest, DoSample_DecidesWhereItIsSaid) {
  EXPECT_EQ(OfFolder(R"({"do_sample": false, "temperature": 0.6})")->samples(), false);
  EXPECT_EQ(OfFolder(R"({"do_sample": true})")->samples(), true);
  EXPECT_EQ(OfFolder(R"({"temperature": 0.6})")->samples(), true);
  EXPECT_EQ(OfFolder(R"({"do_sample": true, "temperature": 0.0})")->samples(), false);
  EXPECT_EQ(OfFolder(R"({"repetition_penalty": 1.1})")->samples(), std::nullopt);
  EXPECT_EQ(OfFolder(R"({"top_k": -1})")->top_k, 0);
}

TEST(GenerationDefaultsTest, WhatIsAdvisedAndNotDone_IsNamed) {
  EXPECT_THAT(OfFolder(R"({"num_beams": 4, "typical_p": 1.0, "suppress_tokens": [5],
      "bad_words_ids": [], "forced_bos_token_id": 0, "no_repeat_ngram_size": 0})")
                  ->ignored,
              ElementsAre("forced_bos_token_id", "num_beams", "suppress_tokens"));
  EXPECT_THAT(OfGguf(GgufWriter().F32("general.sampling.mirostat_tau", 5))->ignored,
              ElementsAre("general.sampling.mirostat_tau"));
}

TEST(GenerationDefaultsTest, OutOfBounds_NamesFileFieldValueAndBound) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"temperature": -0.5})", "temperature=-0.5"},
      {R"({"temperature": "hot"})", "temperature=\"hot\""},
      {R"({"top_p": 1.5})", "top_p=1.5"},
      {R"({"top_k": 2.5})", "top_k=2.5"},
      {R"({"top_k": -2})", "top_k=-2"},
      {R"({"min_p": 2})", "min_p=2"},
      {R"({"repetition_penalty": 0})", "repetition_penalty=0"},
      {R"({"do_sample": 1})", "do_sample=1"},
  };
  for (const auto& [text, what] : cases) {
    EXPECT_THAT(OfFolder(text), StatusIs(Code::kInvalidArgument, what)) << text;
  }
  EXPECT_THAT(OfGguf(GgufWriter().F32("general.sampling.temp", -1)),
              StatusIs(Code::kInvalidArgument, "general.sampling.temp=-1"));
}

}  // namespace
}  // namespace carrel::model
