#include "model/special_tokens.h"

#include <algorithm>
#include <fstream>

#include "common/file.h"
#include "common/status.h"
#include "common/test_util.h"
#include "model/checkpoint.h"
#include "model/gguf_writer.h"
#include "model/test_models.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr int32_t kNormal = 1, kControl = 3, kUserDefined = 4;

struct AnAddedToken {
  std::string text;
  bool special;
};

// A byte-level tokenizer of the letters, with added tokens from kFirst on.
constexpr TokenId kFirst = 3;
const std::vector<AnAddedToken> kAdded = {{"<|endoftext|>", true}, {"<|im_start|>", true},
                                          {"<|im_end|>", true},    {"<tool_call>", false},
                                          {"<|fim_pad|>", false},  {"</s>", false},
                                          {"<end_of_turn>", true}, {"<|mine|>", true}};
constexpr TokenId kVocab = 11;

struct Folder {
  json tokenizer_config = json::object();
  json generation_config = json::object();
  json config = json::object();
};

std::string Write(const Folder& folder) {
  const std::string path = FreshTempDir();
  const auto put = [&](const char* name, const json& value) {
    std::ofstream(path + "/" + name, std::ios::binary) << value.dump();
  };
  json tokenizer = {{"model",
                     {{"type", "BPE"},
                      {"vocab", {{"a", 0}, {"b", 1}, {"ab", 2}}},
                      {"merges", json::array({"a b"})}}},
                    {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
                    {"decoder", {{"type", "ByteLevel"}}},
                    {"added_tokens", json::array()}};
  for (size_t i = 0; i < kAdded.size(); ++i) {
    tokenizer["added_tokens"].push_back({{"id", kFirst + static_cast<TokenId>(i)},
                                         {"content", kAdded[i].text},
                                         {"special", kAdded[i].special},
                                         {"single_word", false},
                                         {"lstrip", false},
                                         {"rstrip", false},
                                         {"normalized", false}});
  }
  put("tokenizer.json", tokenizer);
  put("tokenizer_config.json", folder.tokenizer_config);
  put("generation_config.json", folder.generation_config);
  json config = {
      {"model_type", "llama"},        {"vocab_size", kVocab},    {"hidden_size", 8},
      {"intermediate_size", 8},       {"num_hidden_layers", 1},  {"num_attention_heads", 2},
      {"max_position_embeddings", 8}, {"bos_token_id", nullptr}, {"eos_token_id", nullptr}};
  config.merge_patch(folder.config);
  put("config.json", config);
  return path;
}

std::string WriteAsGguf(TokenId eos, int32_t type_of_tags = kUserDefined) {
  GgufWriter writer;
  writer.String("tokenizer.ggml.model", "gpt2").String("tokenizer.ggml.pre", "gpt-2");
  std::vector<std::string> tokens = {"a", "b", "ab"};
  std::vector<int32_t> types(3, kNormal);
  for (const AnAddedToken& token : kAdded) {
    tokens.push_back(token.text);
    const bool looks = token.text.substr(0, 2) == "<|";
    types.push_back(token.special || looks ? kControl : type_of_tags);
  }
  writer.Strings("tokenizer.ggml.tokens", tokens).Ints("tokenizer.ggml.token_type", types);
  writer.Strings("tokenizer.ggml.merges", {"a b"});
  return WriteGguf(writer.U32("tokenizer.ggml.eos_token_id", eos).Bytes());
}

struct Resolved {
  std::vector<TokenId> ends;
  SpecialTexts texts;
};

absl::StatusOr<Resolved> Resolve(const std::string& path, std::vector<TokenId> ends = {}) {
  ModelConfig config;
  config.vocab_size = kVocab;
  config.eos_token_ids = std::move(ends);
  if (!IsGgufPath(path)) {
    ASSIGN_OR_RETURN(config, LoadModelConfig(path));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<Tokenizer> tokenizer, LoadTokenizer(path));
  ASSIGN_OR_RETURN(SpecialTexts texts, ResolveSpecialTokens(path, *tokenizer, config));
  return Resolved{config.eos_token_ids, std::move(texts)};
}

std::vector<TokenId> Sorted(std::vector<TokenId> ids) {
  std::sort(ids.begin(), ids.end());
  return ids;
}

TEST(SpecialTokensTest, FolderAndGguf_EndAlike) {
  // As Qwen2.5-Instruct has it: eos 151645, and 151643 in generation_config.json alone.
  const auto folder = Resolve(Write({.tokenizer_config = {{"eos_token", "<|im_end|>"}},
                                     .generation_config = {{"eos_token_id", {5, 3}}},
                                     .config = {{"eos_token_id", 5}}}));
  CARREL_ASSERT_OK(folder);
  const auto gguf = Resolve(WriteAsGguf(5), {5});
  CARREL_ASSERT_OK(gguf);
  EXPECT_THAT(Sorted(folder->ends), ElementsAre(3, 5, 7, 9));
  EXPECT_EQ(Sorted(gguf->ends), Sorted(folder->ends));
  EXPECT_EQ(gguf->texts.eos, "<|im_end|>");
  EXPECT_EQ(folder->texts.eos, "<|im_end|>");
}

TEST(SpecialTokensTest, EosOfTheTokenizer_EndsWhateverTheConfigSays) {
  // A ChatML fine-tune whose config.json is still the base's; an end that is known by no text.
  for (const json& eos : {json("<|mine|>"), json{{"content", "<|mine|>"}, {"special", true}}}) {
    const auto resolved =
        Resolve(Write({.tokenizer_config = {{"eos_token", eos}}, .config = {{"eos_token_id", 3}}}));
    CARREL_ASSERT_OK(resolved);
    EXPECT_THAT(Sorted(resolved->ends), ElementsAre(3, 5, 7, 9, 10));
    EXPECT_EQ(resolved->ends.front(), 3);
    EXPECT_EQ(resolved->texts.eos, "<|mine|>");
  }
}

TEST(SpecialTokensTest, OrdinaryTokens_EndNothing) {
  const auto is_in = [](const absl::StatusOr<Resolved>& resolved, TokenId id) {
    EXPECT_TRUE(resolved.ok()) << resolved.status();
    return resolved.ok() && std::count(resolved->ends.begin(), resolved->ends.end(), id) > 0;
  };
  EXPECT_FALSE(is_in(Resolve(Write({})), 8));  // </s> as a tag of HTML
  EXPECT_FALSE(is_in(Resolve(WriteAsGguf(5), {5}), 8));
  EXPECT_FALSE(is_in(Resolve(WriteAsGguf(5, kNormal), {5}), 8));
  EXPECT_TRUE(is_in(Resolve(WriteAsGguf(5, kControl), {5}), 8));
  EXPECT_FALSE(is_in(Resolve(Write({})), 4));  // a beginning
  // What generation_config.json overrules ends answers as a control token alone.
  const json generation = {{"eos_token_id", 5}};
  EXPECT_FALSE(
      is_in(Resolve(Write({.generation_config = generation, .config = {{"eos_token_id", 1}}})), 1));
  EXPECT_TRUE(is_in(
      Resolve(Write({.generation_config = generation, .config = {{"eos_token_id", 10}}})), 10));
  // An eos_token that is no token can never come.
  const auto unknown = Resolve(Write({.tokenizer_config = {{"eos_token", "<|nowhere|>"}}}));
  CARREL_ASSERT_OK(unknown);
  EXPECT_THAT(Sorted(unknown->ends), ElementsAre(3, 5, 7, 9));
}

TEST(SpecialTokensTest, Texts_AreThoseOfTokenizerConfig) {
  const json ids = {{"eos_token_id", {3, 5}}};
  const auto said = Resolve(
      Write({.tokenizer_config = {{"eos_token", "<|im_end|>"}, {"bos_token", "<|endoftext|>"}},
             .config = ids}));
  CARREL_ASSERT_OK(said);
  EXPECT_EQ(said->texts.eos, "<|im_end|>");  // and not the list's first
  EXPECT_EQ(said->texts.bos, "<|endoftext|>");
  const auto null = Resolve(
      Write({.tokenizer_config = {{"eos_token", nullptr}, {"bos_token", nullptr}}, .config = ids}));
  CARREL_ASSERT_OK(null);
  EXPECT_EQ(null->texts.eos, "");
  EXPECT_EQ(null->texts.bos, "");
  const auto silent = Resolve(Write({.config = ids}));
  CARREL_ASSERT_OK(silent);
  EXPECT_EQ(silent->texts.eos, "<|endoftext|>");
  EXPECT_THAT(silent->texts.bos, IsEmpty());
  EXPECT_THAT(Resolve(Write({.tokenizer_config = {{"eos_token", 7}}})),
              StatusIs(absl::StatusCode::kInvalidArgument, "eos_token"));
}

// The whole of it: weights, tokenizer, ends. "<|mine|>" has no embedding, as Gemma 3's <image_soft_token>.
TEST(CheckpointTest, AddedTokenBeyondTheVocabulary_IsText) {
  const std::string folder = Write({.tokenizer_config = {{"eos_token", "<|im_end|>"}},
                                    .generation_config = {{"temperature", 0.6}, {"top_k", 20}},
                                    .config = {{"vocab_size", kVocab - 1}}});
  const auto config = ReadFile(folder + "/config.json");
  CARREL_ASSERT_OK(config);
  CARREL_ASSERT_OK(WriteRandomModel(folder, *config, TestSeed()));
  ThreadPool pool(1);
  const auto checkpoint = LoadCheckpoint(folder, &pool);
  CARREL_ASSERT_OK(checkpoint);
  EXPECT_EQ(checkpoint->tokenizer->vocab_size(), kVocab - 1);
  Tokenizer::Dropped dropped;  // this vocabulary has no token for its other characters
  EXPECT_THAT(*checkpoint->EncodePrompt("a<|mine|>b<|im_end|>", &dropped), ElementsAre(0, 1, 5));
  EXPECT_EQ(dropped.bytes, 8);
  EXPECT_THAT(Sorted(checkpoint->config.eos_token_ids), ElementsAre(3, 5, 7, 9));
  EXPECT_EQ(checkpoint->eos_text, "<|im_end|>");
  EXPECT_EQ(checkpoint->bos_text, "");
  EXPECT_EQ(checkpoint->generation_defaults.temperature, 0.6);
  EXPECT_EQ(checkpoint->generation_defaults.top_k, 20);
}

TEST(CheckpointTest, VocabularyBeyondTheModels_IsRefused) {
  const std::string folder = Write({.config = {{"vocab_size", 2}}});
  const auto config = ReadFile(folder + "/config.json");
  CARREL_ASSERT_OK(config);
  CARREL_ASSERT_OK(WriteRandomModel(folder, *config, TestSeed()));
  ThreadPool pool(1);
  EXPECT_THAT(LoadCheckpoint(folder, &pool),
              StatusIs(absl::StatusCode::kInvalidArgument, "vocab_size is 2"));
}

}  // namespace
}  // namespace carrel::model
