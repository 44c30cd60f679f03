#include "http_api/known_prefixes.h"

#include <random>

#include "common/test_folders.h"
#include "common/test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::http_api {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using Tokens = std::vector<TokenId>;

const model::Tokenizer& DemoTokenizer() {
  static const auto tokenizer = *model::LoadTokenizer(SourceFolder() + "/models/demo");
  return *tokenizer;
}

Tokens Random(size_t n, std::mt19937& random) {
  Tokens tokens(n);
  for (TokenId& token : tokens) token = static_cast<TokenId>(100 + random() % 1900);
  return tokens;
}

Tokens Encoded(const std::string& text) { return *DemoTokenizer().Encode(text); }

std::string Text(const Tokens& tokens) {
  return *DemoTokenizer().Decode(tokens, /*skip_special=*/false);
}

TEST(KnownPrefixesTest, Candidates_AreThoseThatThePromptBeginsWith_LongestFirst) {
  std::mt19937 random(TestSeed());
  for (int trial = 0; trial < 50; ++trial) {
    const Tokens prompt = Random(3000, random);
    KnownPrefixes known;
    const Tokens other = Random(2000, random);
    known.Add("other", other);
    const size_t shorter = 300 + random() % 1000, longer = shorter + 300 + random() % 1000;
    known.Add("shorter", absl::MakeSpan(prompt).first(shorter));
    known.Add("longer", absl::MakeSpan(prompt).first(longer));
    known.Add("small", absl::MakeSpan(prompt).first(200));
    Tokens behind = prompt;
    behind.insert(behind.end(), other.begin(), other.end());
    known.Add("more than the prompt", behind);
    EXPECT_THAT(known.Candidates(prompt), ElementsAre("longer", "shorter"));
    EXPECT_THAT(known.Candidates(absl::MakeSpan(prompt).first(longer - 257 - KnownPrefixes::kSeam)),
                testing::Not(testing::Contains("longer")));
    known.Remove("longer");
    EXPECT_THAT(known.Candidates(prompt), ElementsAre("shorter"));
    Tokens changed = prompt;
    changed[random() % 256] += 1;
    EXPECT_THAT(known.Candidates(changed), IsEmpty());
  }
}

TEST(KnownPrefixesTest, RestOf_IsWhatFollows_WhereTokensAreTheSame) {
  std::mt19937 random(TestSeed());
  const Tokens prompt = Random(1000, random);
  const auto begin = absl::MakeConstSpan(prompt);
  EXPECT_EQ(RestOf(prompt, begin.first(900), DemoTokenizer()),
            Tokens(prompt.begin() + 900, prompt.end()));
  EXPECT_EQ(RestOf(prompt, prompt, DemoTokenizer()), std::nullopt);  // nothing follows
  EXPECT_EQ(RestOf(begin.first(900), prompt, DemoTokenizer()), std::nullopt);
  Tokens changed = prompt;
  changed[500] += 1;
  EXPECT_EQ(RestOf(changed, begin.first(900), DemoTokenizer()), std::nullopt);
}

// However a text is cut in two: the whole, read as a prompt, begins with its first part, and goes on with
// tokens that give the second.
TEST(KnownPrefixesTest, RestOf_ACutThatChangesTokens_HasTheSameText) {
  std::mt19937 random(TestSeed());
  const std::string words[] = {" the lantern", " crossed", ".", "\n",  "\n\n", " Question:",
                               " 12345",       "é",        " ", "...", "a",    " Zupai Vruskvai"};
  int seams = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::string first, second;
    for (int i = 0; i < 40; ++i) first += words[random() % std::size(words)];
    for (int i = 0; i < 5; ++i) second += words[random() % std::size(words)];
    const Tokens document = Encoded(first), prompt = Encoded(first + second);
    const auto rest = RestOf(prompt, document, DemoTokenizer());
    const size_t same = CommonPrefix(prompt, document);
    seams += same < document.size();
    ASSERT_TRUE(rest.has_value() || document.size() - same > KnownPrefixes::kSeam)
        << first << "|" << second;
    if (!rest.has_value()) continue;
    Tokens joined = document;
    joined.insert(joined.end(), rest->begin(), rest->end());
    EXPECT_EQ(Text(joined), first + second);
  }
  EXPECT_GT(seams, 20) << "no cut changed a token: the test tests nothing";
}

TEST(KnownPrefixesTest, RestOf_AControlTokenThatWasText_IsNotTheSame) {
  const std::string before(50, 'x');
  const std::string control = "<|end_of_text|>";
  const Tokens as_control = Encoded(before + control + "a");
  const auto size = static_cast<int64_t>(before.size() + control.size());
  const Tokens as_text = *DemoTokenizer().Encode(before + control, nullptr, {{0, size}});
  ASSERT_NE(as_text, Encoded(before + control));
  EXPECT_EQ(RestOf(as_control, as_text, DemoTokenizer()), std::nullopt);
}

}  // namespace
}  // namespace carrel::http_api
