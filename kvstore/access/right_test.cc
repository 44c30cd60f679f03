#include "kvstore/access/right.h"

#include <set>

#include "carrel/v1/context.pb.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

// A method that is added to a service without a right fails here, and is refused until it has one.
TEST(RightTest, EveryMethodOfEveryService_HasARightAndNothingElseHas) {
  std::set<std::string> methods;
  for (const google::protobuf::FileDescriptor* file :
       {v1::Manifest::descriptor()->file(), v1::SessionRequest::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        methods.insert(
            absl::StrCat(file->service(s)->name(), ".", file->service(s)->method(m)->name()));
      }
    }
  }
  EXPECT_GE(methods.size(), 5u);
  for (const std::string& method : methods) CARREL_EXPECT_OK(RightOf(method));
  for (const RpcRight& row : RpcRights())
    EXPECT_TRUE(methods.contains(std::string(row.rpc))) << row.rpc;
}

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
