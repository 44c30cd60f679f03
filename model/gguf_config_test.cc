#include "model/gguf_config.h"

#include <cmath>

#include "common/test_util.h"
#include "model/gguf_test_model.h"
#include "model/rope_config.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using kernels::GgufType;
using testing::ElementsAre;
using testing::Not;
using Code = absl::StatusCode;

absl::StatusOr<ModelConfig> Read(const GgufWriter& writer) {
  return LoadModelConfig(WriteGguf(writer.Bytes()));
}
absl::Status Error(const GgufWriter& writer) { return Read(writer).status(); }

TEST(GgufConfigTest, EveryArchitecture_IsTheFoldersConfig) {
  for (const char* architecture : {"llama", "qwen2", "qwen3"}) {
    for (const bool biases : {false, true}) {
      SCOPED_TRACE(testing::Message() << architecture << " biases " << biases);
      if (biases && std::string(architecture) != "llama") continue;
      const GgufTestModel model{.architecture = architecture, .biases = biases, .tied = biases};
      const std::string folder = FreshTempDir();
      CARREL_ASSERT_OK(WriteSameModel(model, DType::kF32, folder));
      const auto want = LoadModelConfig(folder);
      const auto got = Read(MakeGguf(model));
      CARREL_ASSERT_OK(want);
      CARREL_ASSERT_OK(got);
      EXPECT_EQ(got->FingerprintFields(), want->FingerprintFields());
      EXPECT_EQ(got->max_position_embeddings, want->max_position_embeddings);
      EXPECT_EQ(got->bos_token_id, want->bos_token_id);
      EXPECT_EQ(got->eos_token_ids, want->eos_token_ids);
    }
  }
}

TEST(GgufConfigTest, EndsOfTextTurnAndMessage_AreEachOnce) {
  GgufWriter writer = MakeGguf({});
  writer.U32("tokenizer.ggml.eot_token_id", 9).U32("tokenizer.ggml.eom_token_id", 2);
  EXPECT_THAT(Read(writer)->eos_token_ids, ElementsAre(2, 9));
  writer.U32("tokenizer.ggml.eot_token_id", kGgufTestVocab);
  EXPECT_THAT(Error(writer), StatusIs(Code::kInvalidArgument, "eot_token_id=96"));
}

TEST(GgufConfigTest, WhatIsNotRun_IsRefusedByName) {
  const auto with = [](auto change) {
    GgufWriter writer = MakeGguf({});
    change(writer);
    return Error(writer);
  };
  EXPECT_THAT(with([](GgufWriter& w) { w.String("general.architecture", "mamba"); }),
              StatusIs(Code::kUnimplemented, "general.architecture=\"mamba\""));
  EXPECT_THAT(with([](GgufWriter& w) { w.Drop("general.architecture"); }),
              StatusIs(Code::kInvalidArgument, "general.architecture is missing"));
  EXPECT_THAT(with([](GgufWriter& w) { w.U32("llama.expert_count", 8); }),
              StatusIs(Code::kUnimplemented, "llama.expert_count=8"));
  EXPECT_THAT(with([](GgufWriter& w) { w.U32("llama.rope.dimension_count", 16); }),
              StatusIs(Code::kUnimplemented, "rope.dimension_count=16"));
  EXPECT_THAT(with([](GgufWriter& w) { w.U32("llama.attention.value_length", 16); }),
              StatusIs(Code::kUnimplemented, "value_length=16"));
  EXPECT_THAT(with([](GgufWriter& w) { w.F32("llama.logit_scale", 2); }),
              StatusIs(Code::kUnimplemented, "llama.logit_scale=2 is not a key"));
  EXPECT_THAT(with([](GgufWriter& w) { w.String("llama.rope.scaling.type", "longrope"); }),
              StatusIs(Code::kUnimplemented, "rope.scaling.type=\"longrope\""));
  EXPECT_THAT(with([](GgufWriter& w) {
                w.Ints("llama.attention.head_count", {4, 8});
              }),
              StatusIs(Code::kUnimplemented, "from layer to layer"));
  CARREL_EXPECT_OK(with([](GgufWriter& w) { w.Ints("llama.attention.head_count", {4, 4}); }));
  CARREL_EXPECT_OK(with([](GgufWriter& w) { w.F32("tokenizer.anything", 2).U32("x.y", 1); }));
}

TEST(GgufConfigTest, SlidingWindow_BoundsTheTokensThatAreRun) {
  const auto with = [](uint32_t window) {
    return Read(MakeGguf({}).U32("llama.attention.sliding_window", window));
  };
  EXPECT_EQ(Read(MakeGguf({}))->MaxTokens(true), INT64_MAX);
  EXPECT_EQ(with(0)->MaxTokens(), 512);
  EXPECT_EQ(with(128)->MaxTokens(), 128);
  EXPECT_EQ(with(512)->MaxTokens(true), 512);  // as long as trained for: no further all the same
}

// What llama.cpp has in its code for the architecture, and what files may say instead.
TEST(GgufConfigTest, Gemma3_HasItsWindowsRopesAndScale) {
  const auto gemma = [](auto change) {
    GgufWriter writer;
    for (const auto& [key, value] : {std::pair<const char*, uint32_t>{"block_count", 8},
                                     {"context_length", 32768},
                                     {"embedding_length", 512},
                                     {"feed_forward_length", 64},
                                     {"attention.head_count", 4},
                                     {"attention.head_count_kv", 1},
                                     {"attention.key_length", 64},
                                     {"attention.value_length", 64},
                                     {"attention.sliding_window", 512}}) {
      writer.U32(absl::StrCat("gemma3.", key), value);
    }
    writer.String("general.architecture", "gemma3").F32("gemma3.rope.freq_base", 1e6f);
    writer.F32("gemma3.attention.layer_norm_rms_epsilon", 1e-6f);
    writer.Tensor("token_embd.weight", GgufType::kF32, {1, 512}, std::string(2048, '\0'));
    change(writer);
    return Read(writer);
  };
  const auto plain = gemma([](GgufWriter&) {});
  CARREL_ASSERT_OK(plain);
  EXPECT_EQ(plain->architecture, Architecture::kGemma3);
  EXPECT_TRUE(plain->gemma && plain->qk_norm && plain->tie_word_embeddings);
  EXPECT_THAT(plain->Windows(), ElementsAre(512, 512, 512, 512, 512, 0, 512, 512));
  EXPECT_EQ(plain->rope.theta, 1e6);
  EXPECT_EQ(plain->sliding.rope.theta, 1e4);
  EXPECT_EQ(plain->query_scalar, 64);
  EXPECT_EQ(plain->window_limit, 0);
  const auto larger = gemma([](GgufWriter& w) {  // as the models of 4B and more have it
    w.String("gemma3.rope.scaling.type", "linear").F32("gemma3.rope.scaling.factor", 8);
  });
  CARREL_ASSERT_OK(larger);
  EXPECT_EQ(larger->rope.factor, 8);
  EXPECT_EQ(larger->sliding.rope.factor, 1);
  EXPECT_EQ(larger->sliding.rope.type, RopeType::kDefault);
  const auto of_27b = gemma([](GgufWriter& w) { w.U32("gemma3.block_count", 62); });
  CARREL_ASSERT_OK(of_27b);
  EXPECT_EQ(of_27b->query_scalar, 128);  // embedding_length / head_count
  const auto said = gemma([](GgufWriter& w) {
    w.F32("gemma3.attention.scale", 0.25f).F32("gemma3.rope.freq_base_swa", 5000);
    w.U32("gemma3.attention.sliding_window_pattern", 2);
  });
  CARREL_ASSERT_OK(said);
  EXPECT_EQ(said->query_scalar, 16);
  EXPECT_EQ(said->sliding.rope.theta, 5000);
  EXPECT_THAT(said->Windows(), ElementsAre(512, 0, 512, 0, 512, 0, 512, 0));
  EXPECT_THAT(gemma([](GgufWriter& w) { w.F32("gemma3.final_logit_softcapping", 30); }).status(),
              StatusIs(Code::kUnimplemented, "final_logit_softcapping=30"));
  EXPECT_THAT(gemma([](GgufWriter& w) { w.Drop("gemma3.attention.sliding_window"); }).status(),
              StatusIs(Code::kInvalidArgument, "sliding_window is missing"));
  EXPECT_THAT(gemma([](GgufWriter& w) {
                w.String("gemma3.rope.scaling.type", "yarn").F32("gemma3.rope.scaling.factor", 2);
              }).status(),
              StatusIs(Code::kUnimplemented, "layers differ in their rope"));
}

TEST(GgufConfigTest, WhatContradictsItself_IsInvalid) {
  const auto with = [](const char* key, uint32_t value) {
    return Error(MakeGguf({}).U32(key, value));
  };
  EXPECT_THAT(with("llama.block_count", 0), StatusIs(Code::kInvalidArgument, "block_count=0"));
  EXPECT_THAT(with("llama.embedding_length", ~0u),
              StatusIs(Code::kInvalidArgument, "[1, 1048576]"));
  EXPECT_THAT(with("llama.attention.head_count", 3), StatusIs(Code::kInvalidArgument, "multiple"));
  EXPECT_THAT(with("llama.attention.key_length", 31), StatusIs(Code::kInvalidArgument, "31"));
  EXPECT_THAT(with("llama.vocab_size", 95), StatusIs(Code::kInvalidArgument, "has 96 rows"));
  EXPECT_THAT(with("tokenizer.ggml.bos_token_id", 96), StatusIs(Code::kInvalidArgument, "=96"));
  EXPECT_THAT(Error(MakeGguf({}).Drop("llama.attention.layer_norm_rms_epsilon")),
              StatusIs(Code::kInvalidArgument, "layer_norm_rms_epsilon is missing"));
  EXPECT_THAT(Error(MakeGguf({}).DropTensor("token_embd.weight")),
              StatusIs(Code::kInvalidArgument, "token_embd.weight"));
}

// Of yarn with factor 4, whose attention factor is 0.1 ln 4 + 1.
void ExpectYarnFactors(const GgufWriter& yarn) {
  const auto with = [&](const char* name, float value) {
    return GgufWriter(yarn).F32(absl::StrCat("llama.rope.scaling.", name), value);
  };
  for (const char* name : {"attn_factor", "yarn_attn_factor"}) {
    for (const float nothing : {1.0f, 0.8782488562869419f}) {  // the second as DeepSeek has it
      const auto read = Read(with(name, nothing));
      CARREL_ASSERT_OK(read) << name << nothing;
      EXPECT_EQ(read->rope, Read(yarn)->rope);
    }
    EXPECT_THAT(Error(with(name, 2)),
                StatusIs(Code::kUnimplemented, absl::StrCat("rope.scaling.", name, "=2")));
  }
  EXPECT_EQ(Read(with("yarn_beta_fast", 16))->rope.beta_fast, 16);
  EXPECT_EQ(Read(with("yarn_beta_slow", 2))->rope.beta_slow, 2);
  EXPECT_THAT(Error(with("yarn_beta_slow", 64)),
              StatusIs(Code::kInvalidArgument, "below yarn_beta_slow=64"));
  CARREL_EXPECT_OK(Read(with("yarn_ext_factor", 1)));
  EXPECT_THAT(Error(with("yarn_ext_factor", 0.5)),
              StatusIs(Code::kUnimplemented, "yarn_ext_factor=0.5"));
  EXPECT_THAT(Error(with("yarn_log_multiplier", 0.1f)),
              StatusIs(Code::kUnimplemented, "yarn_log_multiplier=0.1"));
  // Where there is no yarn, a factor of cosines is one all the same.
  EXPECT_THAT(Error(MakeGguf({}).F32("llama.rope.scaling.attn_factor", 0.5)),
              StatusIs(Code::kUnimplemented, "attn_factor=0.5"));
}

TEST(GgufConfigTest, KeysThatSayNothing_AreTaken) {
  CARREL_EXPECT_OK(Read(MakeGguf({})
                            .U32("llama.expert_shared_feed_forward_length", 0)
                            .U32("llama.expert_shared_count", 0)
                            .F32("llama.expert_weights_scale", 1)
                            .F32("llama.attention.scale", 1 / std::sqrt(32.0f))
                            .Bool("llama.attention.causal", true)
                            .U32("llama.pooling_type", 0)
                            .F32("llama.logit_scale", 1)));
  const std::pair<const char*, float> something[] = {
      {"llama.attention.scale", 1.0f},
      {"llama.logit_scale", 0.0f},
      {"llama.attn_logit_softcapping", 50.0f},
      {"llama.embedding_scale", 12.0f},
      {"llama.pooling_type", 1.0f},
      {"llama.expert_shared_feed_forward_length", 8.0f}};
  for (const auto& [key, value] : something) {
    EXPECT_THAT(Error(MakeGguf({}).F32(key, value)), StatusIs(Code::kUnimplemented, key));
  }
  EXPECT_THAT(Error(MakeGguf({}).Bool("llama.attention.causal", false)),
              StatusIs(Code::kUnimplemented, "attention.causal=false"));
}

TEST(GgufConfigTest, RopeScaling_IsReadInEverySpelling) {
  GgufWriter linear = MakeGguf({});
  linear.String("llama.rope.scaling.type", "linear").F32("llama.rope.scaling.factor", 4);
  EXPECT_EQ(Read(linear)->rope.type, RopeType::kLinear);
  EXPECT_EQ(Read(linear)->rope.factor, 4);
  const GgufWriter old = MakeGguf({}).F32("llama.rope.scale_linear", 2);
  EXPECT_EQ(Read(old)->rope.type, RopeType::kLinear);
  EXPECT_EQ(Read(old)->rope.factor, 2);
  const GgufWriter none = MakeGguf({}).String("llama.rope.scaling.type", "none");
  EXPECT_EQ(Read(none)->rope.type, RopeType::kDefault);
  GgufWriter yarn = MakeGguf({});
  yarn.String("llama.rope.scaling.type", "yarn").F32("llama.rope.scaling.factor", 4);
  yarn.U32("llama.rope.scaling.original_context_length", 128);
  const auto object = nlohmann::json::parse(
      R"({"rope_theta": 5000.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
          "original_max_position_embeddings": 128}})");
  EXPECT_EQ(Read(yarn)->rope, *ParseRopeConfig(JsonFields("json", object), 512));
  ExpectYarnFactors(yarn);
  EXPECT_THAT(Error(GgufWriter(yarn).Drop("llama.rope.scaling.factor")),
              StatusIs(Code::kInvalidArgument, "rope.scaling.factor is missing"));
  EXPECT_THAT(Error(MakeGguf({}).F32("llama.rope.scaling.factor", 2)),
              StatusIs(Code::kInvalidArgument, "without a rope.scaling.type"));
}

TEST(GgufConfigTest, RopeFactorsOfLlama3_AreFoundAgain) {
  RopeConfig want;
  want.type = RopeType::kLlama3;
  want.theta = 5000.0;
  want.factor = 8.0;
  want.low_freq_factor = 1.0;
  want.high_freq_factor = 4.0;
  want.original_max_position_embeddings = 8192;
  RopeConfig plain;
  plain.theta = want.theta;
  const std::vector<float> from = RopeInvFreq(plain, 32), to = RopeInvFreq(want, 32);
  std::vector<float> factors;
  for (size_t i = 0; i < from.size(); ++i) factors.push_back(from[i] / to[i]);
  const auto write = [&](const std::vector<float>& values) {
    const absl::string_view bytes(reinterpret_cast<const char*>(values.data()), values.size() * 4);
    return MakeGguf({}).Tensor("rope_freqs.weight", GgufType::kF32,
                               {static_cast<int64_t>(values.size())}, bytes);
  };
  const auto got = Read(write(factors));
  CARREL_ASSERT_OK(got);
  EXPECT_EQ(got->rope.type, RopeType::kLlama3);
  EXPECT_EQ(got->rope.factor, 8.0);
  EXPECT_EQ(got->rope.original_max_position_embeddings, 8192);
  const std::vector<float> back = RopeInvFreq(got->rope, 32);
  EXPECT_LE(RelativeError(back, to), 1e-7);

  std::vector<float> other = factors;
  other[3] *= 1.01f;
  EXPECT_THAT(Error(write(other)), StatusIs(Code::kUnimplemented, "divides frequency 3"));
  other[3] = NAN;
  EXPECT_THAT(Error(write(other)), StatusIs(Code::kUnimplemented, "divides frequency"));
  EXPECT_THAT(Error(write({1, 2})), StatusIs(Code::kUnimplemented, "is not F32 [16]"));
}

}  // namespace
}  // namespace carrel::model
