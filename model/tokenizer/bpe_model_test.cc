#include "model/tokenizer/bpe_model.h"

#include <numeric>

#include "common/test_util.h"

namespace carrel::model {
namespace {

using testing::ElementsAre;
using Merges = std::vector<std::pair<std::string, std::string>>;

struct Vocabulary {
  absl::flat_hash_map<std::string, TokenId> ids;
  Merges merges;
};

// Random merges over `letters` letters, as a trainer would make them: of tokens that exist.
Vocabulary RandomVocabulary(std::mt19937_64& rng, int letters, int merges) {
  Vocabulary result;
  std::vector<std::string> tokens;
  for (int i = 0; i < letters; ++i) tokens.push_back(std::string(1, static_cast<char>('a' + i)));
  for (int i = 0; i < merges; ++i) {
    const std::string left = tokens[rng() % tokens.size()], right = tokens[rng() % tokens.size()];
    if (left.size() + right.size() > 12) continue;
    result.merges.emplace_back(left, right);
    tokens.push_back(left + right);
  }
  for (const std::string& token : tokens) {
    result.ids.try_emplace(token, static_cast<TokenId>(result.ids.size()));
  }
  return result;
}

// The definition: again and again the known pair of the lowest rank, leftmost.
std::vector<TokenId> Reference(const Vocabulary& vocabulary, const std::string& piece) {
  std::vector<std::string> symbols;
  for (const char c : piece) symbols.push_back(std::string(1, c));
  while (true) {
    size_t best = symbols.size();
    size_t best_rank = vocabulary.merges.size();
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      // The last listing of a pair counts.
      for (size_t rank = vocabulary.merges.size(); rank-- > 0;) {
        if (vocabulary.merges[rank] != std::pair(symbols[i], symbols[i + 1])) continue;
        if (rank < best_rank) best = i, best_rank = rank;
        break;
      }
    }
    if (best == symbols.size()) break;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<ptrdiff_t>(best) + 1);
  }
  std::vector<TokenId> ids;
  for (const std::string& symbol : symbols) ids.push_back(vocabulary.ids.at(symbol));
  return ids;
}

TEST(BpeModel, Encode_RandomVocabularies_EqualsDefinition) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 30; ++round) {
    const Vocabulary vocabulary = RandomVocabulary(rng, 3, 40);
    const auto bpe = BpeModel::Create(vocabulary.ids, vocabulary.merges, false);
    CARREL_ASSERT_OK(bpe);
    BpeModel::Scratch scratch;
    for (int word = 0; word < 20; ++word) {
      std::string piece(rng() % 40, 'a');
      for (char& c : piece) c = static_cast<char>('a' + rng() % 3);
      std::vector<TokenId> ids;
      CARREL_ASSERT_OK(bpe->Encode(piece, &scratch, &ids));
      ASSERT_EQ(ids, Reference(vocabulary, piece)) << piece;
    }
  }
}

// A quadratic loop would not end within the test's time limit.
TEST(BpeModel, Encode_PieceOfOneMillionBytes_IsMergedThroughout) {
  Vocabulary vocabulary;
  vocabulary.ids["a"] = 0;
  std::string token = "a";
  for (int power = 1; power <= 10; ++power) {
    vocabulary.merges.emplace_back(token, token);
    token += token;
    vocabulary.ids[token] = power;
  }
  const auto bpe = BpeModel::Create(vocabulary.ids, vocabulary.merges, false);
  CARREL_ASSERT_OK(bpe);
  BpeModel::Scratch scratch;
  std::vector<TokenId> ids;
  CARREL_ASSERT_OK(bpe->Encode(std::string(1 << 20, 'a'), &scratch, &ids));
  EXPECT_EQ(ids, std::vector<TokenId>(1 << 10, 10));
}

TEST(BpeModel, Encode_WholeWords_SkipsMerging) {
  const absl::flat_hash_map<std::string, TokenId> vocab = {
      {"a", 0}, {"b", 1}, {"c", 2}, {"ab", 3}, {"abc", 4}};
  BpeModel::Scratch scratch;
  std::vector<TokenId> ids;
  const auto merging = BpeModel::Create(vocab, {{"a", "b"}}, false);
  CARREL_ASSERT_OK(merging);
  CARREL_ASSERT_OK(merging->Encode("abc", &scratch, &ids));
  EXPECT_THAT(ids, ElementsAre(3, 2));
  ids.clear();
  const auto whole = BpeModel::Create(vocab, {{"a", "b"}}, true);
  CARREL_ASSERT_OK(whole);
  CARREL_ASSERT_OK(whole->Encode("abc", &scratch, &ids));
  CARREL_ASSERT_OK(whole->Encode("abca", &scratch, &ids));
  EXPECT_THAT(ids, ElementsAre(4, 3, 2, 0));
}

TEST(BpeModel, Create_MergeOfAbsentToken_NamesIt) {
  EXPECT_THAT(BpeModel::Create({{"a", 0}, {"b", 1}}, {{"a", "b"}}, false),
              StatusIs(absl::StatusCode::kInvalidArgument, "\"ab\" is not in the vocabulary"));
  EXPECT_THAT(BpeModel::Create({{"a", 0}}, {{"a", "x"}}, false),
              StatusIs(absl::StatusCode::kInvalidArgument, "\"x\" is not in the vocabulary"));
}

TEST(BpeModel, Encode_ByteWithoutToken_NamesIt) {
  const auto bpe = BpeModel::Create({{"a", 0}}, {}, false);
  CARREL_ASSERT_OK(bpe);
  BpeModel::Scratch scratch;
  std::vector<TokenId> ids;
  EXPECT_THAT(bpe->Encode("a\n", &scratch, &ids),
              StatusIs(absl::StatusCode::kInvalidArgument, "no token for byte 0x0a"));
  EXPECT_TRUE(ids.empty());
}

}  // namespace
}  // namespace carrel::model
