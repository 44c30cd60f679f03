#include "serving/known_contexts.h"

#include "absl/time/clock.h"
#include "common/test_util.h"

namespace carrel::serving {
namespace {

using testing::ElementsAre;
using testing::Pair;

KnownContext Context(const std::string& name, const std::string& content_id) {
  KnownContext context;
  context.document.name = name;
  context.document.content_id = content_id;
  context.used = absl::UnixEpoch();
  return context;
}

std::vector<TokenId> Tokens(int count) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(TokenId{i % 97});
  return tokens;
}

TEST(KnownContextsTest, PrefixesComeAndGoWithTheirContexts_TheLongestFirst) {
  PrefixCache prefixes((PrefixCacheConfig()));
  KnownContexts known(&prefixes);
  prefixes.AddDocument("1", Tokens(600));
  prefixes.AddDocument("2", Tokens(1200));
  const std::vector<TokenId> prompt = Tokens(2000);
  EXPECT_THAT(known.Candidates(prompt), ElementsAre());  // of contexts that are not known yet
  known.Replace({{"a", Context("a", "1")}, {"b", Context("b", "2")}});
  EXPECT_THAT(known.Candidates(prompt), ElementsAre(Pair("b", "2"), Pair("a", "1")));
  known.Remove("b");
  known.Remove("none");
  EXPECT_THAT(known.Candidates(prompt), ElementsAre(Pair("a", "1")));
  known.Replace({{"a", Context("a", "3")}});  // it is another's now
  EXPECT_THAT(known.Candidates(prompt), ElementsAre());
  EXPECT_EQ(known.Find("b"), nullptr);
  EXPECT_EQ(known.Find("a")->document.content_id, "3");
}

TEST(KnownContextsTest, WhenTheyWereUsed_IsKnownUntilTheyAreOthers) {
  PrefixCache prefixes((PrefixCacheConfig()));
  KnownContexts known(&prefixes);
  known.Replace({{"a", Context("a", "1")}});
  known.Use("a");
  known.Use("none");
  const absl::Time used = known.Find("a")->used;
  EXPECT_GT(used, absl::UnixEpoch());
  known.Replace({{"a", Context("a", "1")}});
  EXPECT_EQ(known.Find("a")->used, used);
  known.Replace({{"a", Context("a", "2")}});
  EXPECT_EQ(known.Find("a")->used, absl::UnixEpoch());
}

}  // namespace
}  // namespace carrel::serving
