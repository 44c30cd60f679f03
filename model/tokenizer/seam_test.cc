// Wherever a text is cut in two, document and prompt have the tokens of the whole.
#include "model/tokenizer/seam.h"

#include "absl/strings/match.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/tokenizer/tokenizer_test_util.h"
#include "model/tokenizer/utf8.h"

namespace carrel::model {
namespace {

using Tokens = std::vector<TokenId>;
constexpr int64_t kMost = 32;

// What a seam can change: words, numbers, white space, line ends, marks, characters of several tokens.
std::string RandomText(std::mt19937_64& rng, int64_t pieces, bool runs) {
  static const char* const kPieces[] = {" the",
                                        " captain",
                                        "ab",
                                        "abc",
                                        " a",
                                        "a",
                                        "un",
                                        "believable",
                                        "'s",
                                        " I'll",
                                        "12",
                                        "345",
                                        "6",
                                        ".",
                                        "...",
                                        "?\"",
                                        " ",
                                        "  ",
                                        "\n",
                                        "\n\n",
                                        "\n\n\n",
                                        "\r\n",
                                        "\t",
                                        "\u00A0",
                                        "Question:",
                                        "\u00E9",
                                        "e",
                                        "\u0301",
                                        "\u65E5\u672C",
                                        "\u8A9E",
                                        "\U0001F600",
                                        "\u200D",
                                        "(x_1)",
                                        "://",
                                        "{\"k\": [1,",
                                        "<e",
                                        ">",
                                        "<|end_of",
                                        "_text|>",
                                        "\u0416\u0443\u043A"};
  std::string text;
  for (int64_t i = 0; i < pieces; ++i) {
    text += kPieces[rng() % std::size(kPieces)];
    if (rng() % 40 == 0) text += RandomUtf8(rng, 3);
    if (runs && rng() % 60 == 0)
      text += std::string(rng() % 60, "a\n 7-"[rng() % 5]);  // a long run
  }
  return text;
}

// A place between two characters.
size_t RandomCut(std::mt19937_64& rng, const std::string& text) {
  size_t cut = rng() % (text.size() + 1);
  while (cut < text.size() && (static_cast<uint8_t>(text[cut]) & 0xC0) == 0x80) ++cut;
  return cut;
}

Tokens TailOf(const Tokens& document) {
  return {document.end() - static_cast<std::ptrdiff_t>(std::min(document.size(), kSeamTail)),
          document.end()};
}

Tokens Joined(const Tokens& document, const Seam& seam) {
  Tokens all(document.begin(), document.end() - seam.give_up);
  all.insert(all.end(), seam.tokens.begin(), seam.tokens.end());
  return all;
}

struct Counts {
  int whole = 0, changed = 0, apart = 0;
};

// One text, cut at one place. Texts that a tokenizer does not give back are none of ours.
void TryCut(const Tokenizer& tokenizer, const std::string& first, const std::string& second,
            Counts& counts) {
  const auto document = tokenizer.Encode(first), whole = tokenizer.Encode(first + second);
  CARREL_ASSERT_OK(document);
  CARREL_ASSERT_OK(whole);
  const auto again = tokenizer.Decode(*document, /*skip_special=*/false);
  if (!again.ok() || *tokenizer.Encode(*again + second) != *whole) return;
  // Nor is a control token that the two would make together.
  const auto controls = [&](const Tokens& ids) {
    return std::count_if(ids.begin(), ids.end(),
                         [&](TokenId id) { return IsControl(tokenizer, id); });
  };
  if (controls(*whole) != controls(*document) + controls(*tokenizer.Encode(second))) return;
  const auto seam = JoinTokens(tokenizer, TailOf(*document), kMost, second);
  CARREL_ASSERT_OK(seam);
  ASSERT_LE(seam->give_up, kMost);
  if (!seam->whole) {
    ++counts.apart;
    EXPECT_EQ(seam->give_up, 0);
    EXPECT_EQ(seam->tokens, *tokenizer.Encode(second));
    return;
  }
  ++counts.whole;
  counts.changed += seam->give_up > 0;
  const Tokens joined = Joined(*document, *seam);
  if (joined == *whole) return;
  const auto at = std::mismatch(joined.begin(), joined.end(), whole->begin(), whole->end());
  FAIL() << "tokens differ from " << at.first - joined.begin() << " on, the document has "
         << document->size() << ", given up " << seam->give_up << ": "
         << testing::PrintToString(Tokens(at.first, joined.end())).substr(0, 200) << " instead of "
         << testing::PrintToString(Tokens(at.second, whole->end())).substr(0, 200) << " of "
         << testing::PrintToString(first) << " | " << testing::PrintToString(second);
}

Counts TryManyCuts(const Tokenizer& tokenizer, int trials, bool runs = true) {
  std::mt19937_64 rng(TestSeed());
  Counts counts;
  for (int trial = 0; trial < trials; ++trial) {
    const std::string text = RandomText(rng, 2 + static_cast<int64_t>(rng() % 400), runs);
    const size_t cut = RandomCut(rng, text);
    TryCut(tokenizer, text.substr(0, cut), text.substr(cut), counts);
    if (testing::Test::HasFatalFailure()) break;
  }
  return counts;
}

class SeamOfGoldenTokenizer : public testing::TestWithParam<const char*> {};

TEST_P(SeamOfGoldenTokenizer, AnyCut_GivesTheTokensOfTheWholeText) {
  if (SharedFolder().empty()) GTEST_SKIP() << "no shared folder (CARREL_SHARED)";
  const auto tokenizer =
      LoadTokenizer(absl::StrCat(SharedFolder(), "/golden-models/tokenizers/", GetParam()));
  CARREL_ASSERT_OK(tokenizer);
  // A unigram model takes a run of one mark apart in several ways that are equally likely; which, its
  // library's rounding decides, by all that stands before.
  const bool runs = !absl::StrContains(GetParam(), "unigram");
  const Counts counts = TryManyCuts(**tokenizer, 3000, runs);
  std::printf("%s: %d whole (%d give up tokens), %d apart\n", GetParam(), counts.whole,
              counts.changed, counts.apart);
  EXPECT_GT(counts.changed, counts.whole / 50);
  EXPECT_LT(counts.apart, counts.whole / 20);
}

INSTANTIATE_TEST_SUITE_P(All, SeamOfGoldenTokenizer,
                         testing::Values("bpe-gpt2", "bpe-llama3", "bpe-qwen2", "sentencepiece-bpe",
                                         "sentencepiece-unigram"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(SeamTest, DemoModel_AnyCut_GivesTheTokensOfTheWholeText) {
  const auto tokenizer = LoadTokenizer(DemoDir());
  CARREL_ASSERT_OK(tokenizer);
  const Counts counts = TryManyCuts(**tokenizer, 1000);
  EXPECT_GT(counts.changed, counts.whole / 50);
  EXPECT_LT(counts.apart, counts.whole / 20);
}

// id = byte; 256 "ab", 257 "abc", 258 " a", 259 "<e>".
std::unique_ptr<Tokenizer> Small() {
  return *LoadFiles({{"tokenizer.json", SmallTokenizerJson()}});
}

Seam Join(const Tokenizer& tokenizer, const Tokens& document, const std::string& prompt,
          int64_t most = kMost) {
  return *JoinTokens(tokenizer, TailOf(document), most, prompt);
}

TEST(SeamTest, TheLastTokensAreGivenUp_AndNoMore) {
  const auto tokenizer = Small();
  Seam seam = Join(*tokenizer, {'x', ' ', 'y', 258}, "x");
  EXPECT_EQ(seam.give_up, 0);
  EXPECT_THAT(seam.tokens, testing::ElementsAre('x'));
  seam = Join(*tokenizer, {'x', ' ', 'z', 256}, "cd");
  EXPECT_EQ(seam.give_up, 1);
  EXPECT_THAT(seam.tokens, testing::ElementsAre(257, 'd'));
  EXPECT_TRUE(seam.whole);
  // More than may be: as it stood before, and it says so.
  seam = Join(*tokenizer, {'x', ' ', 'z', 256}, "cd", /*most=*/0);
  EXPECT_EQ(seam.give_up, 0);
  EXPECT_THAT(seam.tokens, testing::ElementsAre('c', 'd'));
  EXPECT_FALSE(seam.whole);
  // Of a document that nothing is known of.
  EXPECT_FALSE(Join(*tokenizer, {}, "cd").whole);
}

TEST(SeamTest, WhatStandsBehindAControlTokenIsATextOfItsOwn) {
  const auto tokenizer = Small();
  const Seam seam = Join(*tokenizer, {256, 259}, "cd");
  EXPECT_EQ(seam.give_up, 0);
  EXPECT_TRUE(seam.whole);
  EXPECT_EQ(Join(*tokenizer, {'a', 259, 256}, "cd").give_up, 1);
}

// The characters of a control token, half of them in a document: text, as it was.
TEST(SeamTest, NoControlTokenIsMadeAcrossTheSeam) {
  const auto tokenizer = Small();
  for (const auto& [document, prompt] :
       {std::pair<std::string, std::string>{"x <", "e> y"}, {"x <e", "> <e>"}, {"x ", "<e> y"}}) {
    const Tokens tokens = *tokenizer->Encode(document);
    const Seam seam = Join(*tokenizer, tokens, prompt);
    const Tokens all = Joined(tokens, seam);
    EXPECT_EQ(std::count(all.begin(), all.end(), 259), prompt.find("<e>") != std::string::npos);
    EXPECT_EQ(*tokenizer->Decode(all, false), document + prompt);
  }
  // Nor is one of what the document holds as text.
  const Tokens written = *tokenizer->Encode("x <e> ab", nullptr, {{0, 8}});
  const Tokens all = Joined(written, Join(*tokenizer, written, "c <e>"));
  EXPECT_EQ(std::count(all.begin(), all.end(), 259), 1);
  EXPECT_EQ(*tokenizer->Decode(all, false), "x <e> abc <e>");
}

TEST(SeamTest, BytesWithoutAToken_AreToldOfThePromptAlone) {
  const auto tokenizer =
      *LoadFiles({{"tokenizer.json", SmallTokenizerJson(R"({"model": {"vocab": {"!": null}}})")}});
  const Tokens document = *tokenizer->Encode("x ab");
  EXPECT_THAT(JoinTokens(*tokenizer, document, kMost, "c!"),
              StatusIs(absl::StatusCode::kInvalidArgument, "byte offset 1 of 2"));
  Tokenizer::Dropped dropped;
  const auto seam = JoinTokens(*tokenizer, document, kMost, "c!", &dropped);
  CARREL_ASSERT_OK(seam);
  EXPECT_EQ(dropped.bytes, 1);
  EXPECT_EQ(dropped.first_offset, 1);
  EXPECT_EQ(seam->give_up, 1);
  EXPECT_THAT(seam->tokens, testing::ElementsAre(257));
}

}  // namespace
}  // namespace carrel::model
