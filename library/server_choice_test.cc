#include "library/server_choice.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "common/test_util.h"

namespace carrel::library {
namespace {

TEST(ServerChoiceTest, AContext_IsAlwaysTriedInTheSameOrder_AndContextsAreSpread) {
  const ServerChoice choice({"a:1", "b:1", "c:1"}), same({"c:1", "a:1", "b:1"});
  std::set<std::string> first;
  for (int i = 0; i < 50; ++i) {
    const std::string context = absl::StrCat("context-", i);
    EXPECT_EQ(choice.For(context), same.For(context));
    EXPECT_EQ(choice.For(context).size(), 3u);
    first.insert(choice.For(context)[0]);
  }
  EXPECT_EQ(first.size(), 3u);
}

TEST(ServerChoiceTest, WhoFailed_ComesLast) {
  ServerChoice choice({"a:1", "b:1", "c:1"});
  const std::vector<std::string> before = choice.For("report");
  choice.Failed(before[0]);
  EXPECT_EQ(choice.For("report"), (std::vector<std::string>{before[1], before[2], before[0]}));
  choice.Failed(before[1]);
  EXPECT_EQ(choice.For("report"), (std::vector<std::string>{before[2], before[0], before[1]}));
}

TEST(ServerChoiceTest, OneServer_IsTried_HoweverOftenItFailed) {
  ServerChoice choice({"a:1"});
  choice.Failed("a:1");
  EXPECT_EQ(choice.For("x"), std::vector<std::string>{"a:1"});
}

}  // namespace
}  // namespace carrel::library
