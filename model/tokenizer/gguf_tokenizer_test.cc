#include "model/tokenizer/gguf_tokenizer.h"

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/file.h"
#include "common/status.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/gguf_writer.h"
#include "model/tokenizer/tokenizer_test_util.h"

namespace carrel::model {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using Code = absl::StatusCode;

constexpr int32_t kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kByte = 6;

absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const GgufWriter& writer) {
  return LoadTokenizer(WriteGguf(writer.Bytes()));
}

json ReadJson(const std::string& path) {
  const auto text = ReadFile(path);
  CARREL_CHECK(text.ok());
  return json::parse(*text);
}

GgufWriter Convert(const json& tokenizer, const std::string& pre) {
  GgufWriter writer;
  return PutBpeTokenizer(tokenizer, pre, writer);
}

// What the Python package `tokenizers` makes of texts under each pre-tokenizer, with merges that
// cross words and numbers (tools/goldens/gguf_files.py).
TEST(GgufTokenizerTest, EveryPreTokenizer_GivesTheIdsOfThePythonPackage) {
  const json goldens = ReadJson(SourceFolder() + "/model/testdata/gguf_pre.json");
  EXPECT_EQ(goldens["ids"].size(), 14u);
  for (const auto& [pre, all_ids] : goldens["ids"].items()) {
    const auto tokenizer = Load(Convert(goldens["tokenizer"], pre));
    CARREL_ASSERT_OK(tokenizer);
    ASSERT_EQ(all_ids.size(), goldens["texts"].size());
    for (size_t i = 0; i < all_ids.size(); ++i) {
      const std::string text = goldens["texts"][i];
      const auto ids = (*tokenizer)->Encode(text);
      CARREL_ASSERT_OK(ids);
      EXPECT_EQ(*ids, all_ids[i].get<std::vector<TokenId>>()) << pre << ": " << text;
    }
  }
}

// Every name that stands for a row of another name, which has goldens.
TEST(GgufTokenizerTest, EveryName_IsItsRow) {
  const std::pair<const char*, std::vector<const char*>> kRows[] = {
      {"gpt-2",
       {"phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "olmo", "jais", "trillion",
        "granite-docling"}},
      {"smollm", {"starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"}},
      {"llama-bpe", {"llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}},
      {"dbrx", {"smaug-bpe"}},
      {"qwen2", {"deepseek-r1-qwen"}},
      {"megrez", {"kormo", "hunyuan", "solar-open", "grok-2"}},
      {"gpt-4o", {"llama4"}},
      {"deepseek-v3", {"hunyuan-dense"}}};
  const json goldens = ReadJson(SourceFolder() + "/model/testdata/gguf_pre.json");
  for (const auto& [row, names] : kRows) {
    ASSERT_TRUE(goldens["ids"].contains(row)) << row;
    for (const char* name : names) {
      const auto load = [&](const char* pre) {
        return *Load(Convert(goldens["tokenizer"], pre).U32("tokenizer.ggml.bos_token_id", 0));
      };
      const auto want = load(row), got = load(name);
      EXPECT_EQ(got->bos_token_id(), want->bos_token_id()) << name;
      for (const json& text : goldens["texts"]) {
        EXPECT_EQ(*got->Encode(text.get<std::string>()), *want->Encode(text.get<std::string>()))
            << name << ": " << text;
      }
    }
  }
}

TEST(GgufTokenizerTest, RandomText_GivesTheIdsOfTheFolder) {
  std::mt19937_64 rng(TestSeed());
  const auto folder = LoadTokenizer(DemoDir());
  const auto file = Load(Convert(ReadJson(DemoDir() + "/tokenizer.json"), "llama-bpe")
                             .Bool("tokenizer.ggml.add_bos_token", false));
  CARREL_ASSERT_OK(folder);
  CARREL_ASSERT_OK(file);
  for (int round = 0; round < 200; ++round) {
    std::string text = RandomUtf8(rng, static_cast<int64_t>(rng() % 60));
    if (round % 4 == 0) text += "<|end_of_text|>";
    const auto want = (*folder)->Encode(text), got = (*file)->Encode(text);
    ASSERT_EQ(want.ok(), got.ok()) << text;
    if (!want.ok()) continue;
    // The demo's pattern takes single digits; llama-bpe up to three. Its vocabulary merges none.
    EXPECT_EQ(*got, *want) << text;
    EXPECT_EQ(*(*file)->Decode(*got, false), *(*folder)->Decode(*want, false));
    EXPECT_EQ(*(*file)->Decode(*got, true), *(*folder)->Decode(*want, true));
  }
}

TEST(GgufTokenizerTest, GoldenVectors_AreThoseOfTheFolder) {
  if (SharedFolder().empty()) GTEST_SKIP() << "no shared folder (CARREL_SHARED)";
  const std::pair<const char*, const char*> kCases[] = {
      {"bpe-gpt2", "gpt-2"}, {"bpe-llama3", "llama-bpe"}, {"bpe-qwen2", "qwen2"}};
  for (const auto& [name, pre] : kCases) {
    SCOPED_TRACE(name);
    const std::string dir = absl::StrCat(SharedFolder(), "/golden-models/tokenizers/", name);
    const auto tokenizer = Load(Convert(ReadJson(dir + "/tokenizer.json"), pre));
    CARREL_ASSERT_OK(tokenizer);
    for (const TokenizerVector& vector : ReadVectors(dir + "/vectors.json")) {
      const auto ids = (*tokenizer)->Encode(vector.text);
      CARREL_ASSERT_OK(ids);
      EXPECT_EQ(*ids, vector.ids) << vector.text;
    }
  }
}

GgufWriter Small() {
  GgufWriter writer;
  writer.String("tokenizer.ggml.model", "gpt2").String("tokenizer.ggml.pre", "gpt-2");
  writer.Strings("tokenizer.ggml.tokens", {"a", "b", "ab", "<s>", "<go>", "\xC4\xA0"});
  writer.Ints("tokenizer.ggml.token_type",
              {kNormal, kNormal, kNormal, kControl, kUserDefined, kNormal});
  return writer.Strings("tokenizer.ggml.merges", {"a b"});
}

TEST(GgufTokenizerTest, ControlAndUserDefinedTokens_AreMatchedInText) {
  const auto tokenizer = Load(Small());
  CARREL_ASSERT_OK(tokenizer);
  EXPECT_THAT(*(*tokenizer)->Encode("ab<s>a<go>b b"), ElementsAre(2, 3, 0, 4, 1, 5, 1));
  EXPECT_EQ(*(*tokenizer)->Decode({2, 3, 4, 5}, true), "ab<go> ");
  EXPECT_EQ(*(*tokenizer)->Decode({2, 3, 4, 5}, false), "ab<s><go> ");
}

// Files from before the key was written are read, and whoever reads them is warned.
TEST(GgufTokenizerTest, WithoutAPreTokenizersName_TheLogWarns) {
  std::ostringstream log;
  auto& sinks = spdlog::default_logger()->sinks();
  sinks.push_back(std::make_shared<spdlog::sinks::ostream_sink_st>(log));
  const auto named = Load(Small());
  const std::string of_named = log.str();
  const auto unnamed = Load(Small().Drop("tokenizer.ggml.pre"));
  sinks.pop_back();
  CARREL_ASSERT_OK(named);
  CARREL_ASSERT_OK(unnamed);
  EXPECT_EQ(of_named, "");
  EXPECT_THAT(log.str(), testing::HasSubstr("has no tokenizer.ggml.pre"));
  EXPECT_THAT(*(*unnamed)->Encode("ab"), ElementsAre(2));
}

TEST(GgufTokenizerTest, Bos_FollowsTheKeyOrThePreTokenizer) {
  const auto bos = [](const GgufWriter& writer) {
    const auto tokenizer = Load(writer);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    return tokenizer.ok() ? (*tokenizer)->bos_token_id() : -2;
  };
  EXPECT_EQ(bos(Small()), -1);
  EXPECT_EQ(bos(Small().U32("tokenizer.ggml.bos_token_id", 3)), -1);
  GgufWriter with = Small().U32("tokenizer.ggml.bos_token_id", 3);
  EXPECT_EQ(bos(GgufWriter(with).Bool("tokenizer.ggml.add_bos_token", true)), 3);
  EXPECT_EQ(bos(GgufWriter(with).String("tokenizer.ggml.pre", "llama-bpe")), 3);
  EXPECT_EQ(bos(GgufWriter(with)
                    .String("tokenizer.ggml.pre", "llama-bpe")
                    .Bool("tokenizer.ggml.add_bos_token", false)),
            -1);
  for (const char* pre : {"falcon3", "pixtral", "tekken"}) {
    EXPECT_EQ(bos(GgufWriter(with).String("tokenizer.ggml.pre", pre)), 3) << pre;
  }
  for (const char* pre : {"smaug-bpe", "qwen35", "gpt-4o", "deepseek-v3", "command-r"}) {
    EXPECT_EQ(bos(GgufWriter(with).String("tokenizer.ggml.pre", pre)), -1) << pre;
  }
  EXPECT_EQ(bos(Small().String("tokenizer.ggml.pre", "tekken")), -1);  // there is none
  EXPECT_THAT(Load(Small().Bool("tokenizer.ggml.add_bos_token", true)),
              StatusIs(Code::kInvalidArgument, "there is no tokenizer.ggml.bos_token_id"));
}

TEST(GgufTokenizerTest, ChatTemplate_IsKept) {
  EXPECT_EQ((*Load(Small()))->chat_template(), "");
  const auto tokenizer = Load(Small().String("tokenizer.chat_template", "{{ bos }}"));
  CARREL_ASSERT_OK(tokenizer);
  EXPECT_EQ((*tokenizer)->chat_template(), "{{ bos }}");
}

TEST(GgufTokenizerTest, Digest_CoversWhatDecidesIds) {
  const auto digest = [](const GgufWriter& writer) { return (*Load(writer))->sha256(); };
  const std::string first = digest(Small());
  EXPECT_EQ(digest(Small().String("tokenizer.chat_template", "x").String("general.name", "y")),
            first);
  EXPECT_NE(digest(Small().String("tokenizer.ggml.pre", "smollm")), first);
  EXPECT_NE(digest(Small().Strings("tokenizer.ggml.merges", {})), first);
  EXPECT_NE(digest(Small().Ints("tokenizer.ggml.token_type", {1, 1, 1, 3, 3, 1})), first);
}

TEST(GgufTokenizerTest, WhatIsNotRunOrContradictsItself_IsRefused) {
  const auto error = [](const GgufWriter& writer) { return Load(writer).status(); };
  EXPECT_THAT(error(GgufWriter().U32("x", 1)), StatusIs(Code::kNotFound, "tokenizer.ggml.model"));
  EXPECT_THAT(error(Small().String("tokenizer.ggml.model", "t5")),
              StatusIs(Code::kUnimplemented, "tokenizer.ggml.model=\"t5\""));
  EXPECT_THAT(error(Small().String("tokenizer.ggml.pre", "kimi-k2")),
              StatusIs(Code::kUnimplemented,
                       "tokenizer.ggml.pre=\"kimi-k2\" is not one of default, gpt-2, phi-2"));
  EXPECT_THAT(error(Small().Drop("tokenizer.ggml.merges")),
              StatusIs(Code::kInvalidArgument, "tokenizer.ggml.merges is missing"));
  EXPECT_THAT(error(Small().Strings("tokenizer.ggml.merges", {"ab"})),
              StatusIs(Code::kInvalidArgument, "[0] is \"ab\", not two tokens"));
  EXPECT_THAT(error(Small().Strings("tokenizer.ggml.merges", {"b b"})),
              StatusIs(Code::kInvalidArgument, "\"bb\" is not in the vocabulary"));
  EXPECT_THAT(error(Small().Strings("tokenizer.ggml.tokens", {"a", "b", "ab", "a", "c", "d"})),
              StatusIs(Code::kInvalidArgument, "holds \"a\" as 0 and as 3"));
  EXPECT_THAT(error(Small().Ints("tokenizer.ggml.token_type", {1})),
              StatusIs(Code::kInvalidArgument, "but there are 6 tokens"));
  EXPECT_THAT(error(Small().Ints("tokenizer.ggml.token_type", {1, 1, 1, 1, 1, 9})),
              StatusIs(Code::kInvalidArgument, "holds 9 for token 5"));
  EXPECT_THAT(error(Small().U32("tokenizer.ggml.bos_token_id", 6)),
              StatusIs(Code::kInvalidArgument, "bos_token_id=6"));
}

// A SentencePiece BPE model: unknown, <s>, </s>, 256 bytes, characters, merges by score.
struct Pieces {
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
  std::vector<float> scores = {0, 0, 0};
  std::vector<int32_t> types = {kUnknown, kControl, kControl};

  Pieces() {
    for (int byte = 0; byte < 256; ++byte) Add(absl::StrFormat("<0x%02X>", byte), 0, kByte);
    const char* const merged[] = {"he", "ll", "hell", "hello", "\xE2\x96\x81hello", "lo"};
    for (const char* piece : merged) Add(piece, -static_cast<float>(tokens.size()), kNormal);
    for (const char* piece : {"\xE2\x96\x81", "h", "e", "l", "o"}) {
      Add(piece, -static_cast<float>(tokens.size()), kNormal);
    }
    Add("<tool>", -1000, kUserDefined);
  }
  void Add(std::string token, float score, int32_t type) {
    tokens.push_back(std::move(token));
    scores.push_back(score);
    types.push_back(type);
  }
  TokenId Id(const std::string& token) const {
    return static_cast<TokenId>(std::find(tokens.begin(), tokens.end(), token) - tokens.begin());
  }
  GgufWriter Writer() const {
    GgufWriter writer;
    writer.String("tokenizer.ggml.model", "llama").Strings("tokenizer.ggml.tokens", tokens);
    writer.Floats("tokenizer.ggml.scores", scores).Ints("tokenizer.ggml.token_type", types);
    return writer.U32("tokenizer.ggml.bos_token_id", 1);
  }
};

TEST(GgufSentencePieceTest, Text_IsMergedByScore) {
  const Pieces pieces;
  const auto tokenizer = Load(pieces.Writer());
  CARREL_ASSERT_OK(tokenizer);
  EXPECT_EQ((*tokenizer)->bos_token_id(), 1);
  EXPECT_EQ((*tokenizer)->vocab_size(), static_cast<int64_t>(pieces.tokens.size()));
  // By score "he" comes first, then "ll", "hell"; "hello" needs "hell" and "o".
  EXPECT_THAT(*(*tokenizer)->Encode("hello"), ElementsAre(pieces.Id("\xE2\x96\x81hello")));
  EXPECT_THAT(*(*tokenizer)->Encode("<s>hello<tool>"),
              ElementsAre(1, pieces.Id("\xE2\x96\x81hello"), pieces.Id("<tool>")));
  // No piece for z: its byte.
  EXPECT_THAT(*(*tokenizer)->Encode("z"), ElementsAre(pieces.Id("\xE2\x96\x81"), 3 + 'z'));
  for (const char* text : {"hello hello", "  two  spaces ", "\xE6\x97\xA5\xE6\x9C\xAC\n"}) {
    EXPECT_EQ(*(*tokenizer)->Decode(*(*tokenizer)->Encode(text), true), text);
  }
}

TEST(GgufSentencePieceTest, Keys_DecidePrefixAndBos) {
  const Pieces pieces;
  const auto tokenizer = Load(pieces.Writer()
                                  .Bool("tokenizer.ggml.add_space_prefix", false)
                                  .Bool("tokenizer.ggml.add_bos_token", false));
  CARREL_ASSERT_OK(tokenizer);
  EXPECT_EQ((*tokenizer)->bos_token_id(), -1);
  EXPECT_THAT(*(*tokenizer)->Encode("hello"), ElementsAre(pieces.Id("hello")));
}

TEST(GgufTokenizerTest, RandomMutations_GiveATokenizerOrAnError) {
  std::mt19937_64 rng(TestSeed());
  for (const GgufWriter& writer : {Small(), Pieces().Writer()}) {
    const std::string whole = writer.Bytes();
    int loaded = 0, refused = 0;
    for (int round = 0; round < 200; ++round) {
      const auto tokenizer = LoadTokenizer(WriteGguf(Mutate(whole, whole.size() - 8, rng)));
      ++(tokenizer.ok() ? loaded : refused);
      if (tokenizer.ok()) (void)(*tokenizer)->Encode("hello <s>ab<go> z");
    }
    EXPECT_GT(refused, 10);
    EXPECT_GT(loaded, 0);
  }
}

TEST(GgufSentencePieceTest, WhatContradictsItself_IsRefused) {
  const auto error = [](const GgufWriter& writer) { return Load(writer).status(); };
  const Pieces pieces;
  EXPECT_THAT(error(pieces.Writer().Floats("tokenizer.ggml.scores", {1})),
              StatusIs(Code::kInvalidArgument, "tokenizer.ggml.scores=array of 1 but there are"));
  EXPECT_THAT(error(pieces.Writer().Drop("tokenizer.ggml.token_type")),
              StatusIs(Code::kInvalidArgument, "token_type is missing"));
  Pieces infinite;
  infinite.scores[5] = INFINITY;
  EXPECT_THAT(error(infinite.Writer()), StatusIs(Code::kInvalidArgument, "holds inf for token 5"));
  Pieces without;
  without.types[0] = kNormal;
  EXPECT_THAT(error(without.Writer()), StatusIs(Code::kInvalidArgument, "SentencePiece"));
  EXPECT_THAT(error(pieces.Writer().Strings("tokenizer.ggml.precompiled_charsmap", {"x"})),
              StatusIs(Code::kUnimplemented, "precompiled_charsmap"));
}

}  // namespace
}  // namespace carrel::model
