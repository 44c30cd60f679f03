#include "serving/known_prefixes.h"

#include <random>

#include "common/test_folders.h"
#include "common/test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::serving {
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

TEST(KnownPrefixesTest, RestOf_IsThePromptBehindWhatBothBeginWith) {
  std::mt19937 random(TestSeed());
  const Tokens prompt = Random(1000, random);
  const auto begin = absl::MakeConstSpan(prompt);
  const auto expect = [](const std::optional<PrefixRest>& rest, int64_t give_up, Tokens tokens) {
    ASSERT_TRUE(rest.has_value());
    EXPECT_EQ(rest->give_up, give_up);
    EXPECT_EQ(rest->rest, tokens);
  };
  expect(RestOf(prompt, begin.first(900), 32), 0, {prompt.begin() + 900, prompt.end()});
  // Something has to be read for an answer: the document's last token.
  expect(RestOf(prompt, prompt, 32), 1, {prompt.back()});
  expect(RestOf(begin.first(990), prompt, 32), 11, {prompt[989]});
  EXPECT_FALSE(RestOf(prompt, prompt, 0).has_value());
  EXPECT_FALSE(RestOf(begin.first(900), prompt, 32).has_value());
  Tokens changed = prompt;
  changed[897] += 1;
  expect(RestOf(changed, begin.first(900), 3), 3, {changed.begin() + 897, changed.end()});
  EXPECT_FALSE(RestOf(changed, begin.first(900), 2).has_value());
  changed[500] += 1;
  EXPECT_FALSE(RestOf(changed, begin.first(900), 32).has_value());
  EXPECT_FALSE(RestOf({}, begin.first(900), 32).has_value());
}

// However a text is cut in two: the whole, read as a prompt, stays what it is.
TEST(KnownPrefixesTest, RestOf_ACutThatChangesTokens_GivesThoseOfTheWhole) {
  std::mt19937 random(TestSeed());
  const std::string words[] = {" the lantern", " crossed", ".", "\n",  "\n\n", " Question:",
                               " 12345",       "é",        " ", "...", "a",    " Zupai Vruskvai"};
  int seams = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::string first, second;
    for (int i = 0; i < 40; ++i) first += words[random() % std::size(words)];
    for (int i = 0; i < 5; ++i) second += words[random() % std::size(words)];
    const Tokens document = Encoded(first), prompt = Encoded(first + second);
    const auto rest = RestOf(prompt, document, 32);
    const size_t same = CommonPrefix(prompt, document);
    ASSERT_EQ(rest.has_value(), document.size() - same <= KnownPrefixes::kSeam)
        << first << "|" << second;
    if (!rest.has_value()) continue;
    seams += rest->give_up > 0;
    Tokens joined(document.begin(), document.end() - rest->give_up);
    joined.insert(joined.end(), rest->rest.begin(), rest->rest.end());
    EXPECT_EQ(joined, prompt);
  }
  EXPECT_GT(seams, 20) << "no cut changed a token: the test tests nothing";
}

}  // namespace
}  // namespace carrel::serving
