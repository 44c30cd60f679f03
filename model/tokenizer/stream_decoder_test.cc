// StreamDecoder hands out Decode's bytes, in whole characters, as early as it can.
#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/tokenizer/tokenizer_test_util.h"
#include "model/tokenizer/utf8.h"

namespace carrel::model {
namespace {

// Every id that Decode knows.
std::vector<TokenId> UsedIds(const Tokenizer& tokenizer) {
  std::vector<TokenId> ids;
  for (TokenId id = 0; id < tokenizer.vocab_size(); ++id) {
    if (tokenizer.Decode({id}, false).ok()) ids.push_back(id);
  }
  return ids;
}

void ExpectStreamEqualsDecode(const Tokenizer& tokenizer, const std::vector<TokenId>& ids,
                              bool skip_special) {
  const auto whole = tokenizer.Decode(ids, skip_special);
  CARREL_ASSERT_OK(whole);
  StreamDecoder stream(&tokenizer, skip_special);
  std::string handed_out;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto text = stream.Push(ids[i]);
    CARREL_ASSERT_OK(text);
    handed_out += *text;
    // All that is final, and no more: the rest could still become a character.
    const auto so_far = tokenizer.Decode({ids.data(), i + 1}, skip_special);
    CARREL_ASSERT_OK(so_far);
    ASSERT_EQ(handed_out, so_far->substr(0, CompleteUtf8Size(*so_far))) << "after token " << i;
  }
  const auto rest = stream.Finish();
  CARREL_ASSERT_OK(rest);
  ASSERT_EQ(handed_out + *rest, *whole);
}

void ExpectStreamsOfRandomIds(const Tokenizer& tokenizer) {
  std::mt19937_64 rng(TestSeed());
  const std::vector<TokenId> used = UsedIds(tokenizer);
  ASSERT_FALSE(used.empty());
  for (int round = 0; round < 200; ++round) {
    std::vector<TokenId> ids(rng() % 40);
    // Half of the rounds only among the first ids: bytes and special tokens.
    const size_t range = round % 2 == 0 ? used.size() : std::min<size_t>(used.size(), 262);
    for (TokenId& id : ids) id = used[rng() % range];
    ExpectStreamEqualsDecode(tokenizer, ids, round % 4 < 2);
  }
  for (int round = 0; round < 20; ++round) {
    const auto ids = tokenizer.Encode(RandomUtf8(rng, 60));
    CARREL_ASSERT_OK(ids);
    ExpectStreamEqualsDecode(tokenizer, *ids, false);
  }
}

class StreamDecoderGolden : public testing::TestWithParam<const char*> {};

TEST_P(StreamDecoderGolden, Push_RandomIds_EqualsDecode) {
  if (SharedFolder().empty()) GTEST_SKIP() << "no shared folder (CARREL_SHARED)";
  const auto tokenizer =
      LoadTokenizer(absl::StrCat(SharedFolder(), "/golden-models/tokenizers/", GetParam()));
  CARREL_ASSERT_OK(tokenizer);
  ExpectStreamsOfRandomIds(**tokenizer);
}

INSTANTIATE_TEST_SUITE_P(All, StreamDecoderGolden,
                         testing::Values("bpe-gpt2", "bpe-llama3", "bpe-qwen2", "sentencepiece-bpe",
                                         "sentencepiece-unigram"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(StreamDecoder, Push_DemoRandomIds_EqualsDecode) {
  const auto tokenizer = LoadTokenizer(DemoDir());
  CARREL_ASSERT_OK(tokenizer);
  ExpectStreamsOfRandomIds(**tokenizer);
}

TEST(StreamDecoder, Push_SentencePieceRandomIds_EqualsDecode) {
  for (const bool remove_extra : {false, true}) {
    const auto tokenizer =
        LoadFiles({{"tokenizer.model",
                    SmallSentencePieceModel({"\u2581", "\u2581a", "a", "\u2581\u2581", "\u00E9"},
                                            {.remove_extra_whitespaces = remove_extra})}});
    CARREL_ASSERT_OK(tokenizer);
    ExpectStreamsOfRandomIds(**tokenizer);
  }
}

TEST(StreamDecoder, Push_BytesOfOneCharacter_WaitsForTheLast) {
  const auto tokenizer = LoadFiles({{"tokenizer.json", SmallTokenizerJson()}});
  CARREL_ASSERT_OK(tokenizer);
  StreamDecoder stream(tokenizer->get());
  EXPECT_EQ(*stream.Push('x'), "x");
  EXPECT_EQ(*stream.Push(0xF0), "");
  EXPECT_EQ(*stream.Push(0x9F), "");
  EXPECT_EQ(*stream.Push(259), "");  // a special token in between adds nothing
  EXPECT_EQ(*stream.Push(0x98), "");
  EXPECT_EQ(*stream.Push(0x80), "\U0001F600");
  EXPECT_EQ(*stream.Push(0xE2), "");
  EXPECT_EQ(*stream.Push('y'), "\xE2y");  // invalid for good
  EXPECT_EQ(*stream.Push(0xC3), "");
  EXPECT_EQ(*stream.Finish(), "\xC3");
  EXPECT_EQ(*stream.Finish(), "");
}

TEST(StreamDecoder, Push_UnknownId_FailsAndChangesNothing) {
  const auto tokenizer = LoadFiles({{"tokenizer.json", SmallTokenizerJson()}});
  CARREL_ASSERT_OK(tokenizer);
  StreamDecoder stream(tokenizer->get());
  EXPECT_EQ(*stream.Push(0xC3), "");
  for (const TokenId id : {-1, 260}) {
    EXPECT_THAT(stream.Push(id), StatusIs(absl::StatusCode::kInvalidArgument,
                                          absl::StrCat("token id ", id, " is not")));
  }
  EXPECT_EQ(*stream.Push(0xA9), "\u00E9");
}

TEST(StreamDecoder, Finish_ThenPush_BeginsAnew) {
  const auto tokenizer =
      LoadFiles({{"tokenizer.model", SmallSentencePieceModel({"\u2581a", "\u2581"})}});
  CARREL_ASSERT_OK(tokenizer);
  StreamDecoder stream(tokenizer->get());
  EXPECT_EQ(*stream.Push(259), "a");
  EXPECT_EQ(*stream.Push(259), " a");
  EXPECT_EQ(*stream.Finish(), "");
  EXPECT_EQ(*stream.Push(259), "a");
}

}  // namespace
}  // namespace carrel::model
