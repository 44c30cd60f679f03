#include "kvstore/access/right.h"

#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

TEST(RightTest, UnlistedCall_IsDenied) {
  EXPECT_THAT(RightOf("ContextService.Format"),
              StatusIs(absl::StatusCode::kPermissionDenied, "ContextService.Format"));
  EXPECT_THAT(RightOf(""), StatusIs(absl::StatusCode::kPermissionDenied, "no right"));
}

TEST(RightTest, Names_ComeBack) {
  for (const char* name : {"list", "open", "import", "delete", "admin"}) {
    const auto right = ParseRight(name);
    CARREL_ASSERT_OK(right);
    EXPECT_EQ(RightName(*right), name);
    EXPECT_TRUE(Rights::All().Has(*right));
    EXPECT_FALSE(Rights().Has(*right));
  }
  EXPECT_THAT(ParseRight("List"),
              StatusIs(absl::StatusCode::kInvalidArgument, "\"List\" is no right"));
  EXPECT_EQ(RightNames({Right::kDelete, Right::kList}), "list delete");
  EXPECT_EQ(RightNames({}), "none");
}

}  // namespace
}  // namespace carrel::kvstore
