#include "tools/carrel/manifest_report.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/test_util.h"

namespace carrel::tools {
namespace {

constexpr char kWhy[] = "context old has format version 7, this program reads versions 1 to 3";

v1::ListResponse List(bool readable, bool unreadable) {
  v1::ListResponse list;
  if (readable) {
    v1::ListResponse::Summary& context = *list.add_contexts();
    context.set_name("report");
    context.set_tokens(300);
    context.set_index_kind("code");
  }
  if (unreadable) list.add_unreadable(kWhy);
  return list;
}

TEST(ContextsReportTest, ContextThatCannotBeRead_IsNamedInEveryForm) {
  for (const bool readable : {false, true}) {
    const v1::ListResponse list = List(readable, true);
    const nlohmann::json json = ContextsJson(list);
    EXPECT_EQ(json["unreadable"], nlohmann::json::array({kWhy}));
    EXPECT_EQ(json["contexts"].size(), readable ? 1u : 0u);
    EXPECT_EQ(UnreadableContexts(list), absl::StrCat("cannot be read: ", kWhy, "\n"));
  }
  EXPECT_EQ(ContextsTable(List(false, true)), "no contexts that can be read\n");
}

TEST(ContextsReportTest, OnlyReadableOrNone_NothingElseIsSaid) {
  EXPECT_EQ(ContextsTable(List(false, false)), "no contexts\n");
  EXPECT_EQ(UnreadableContexts(List(true, false)), "");
  EXPECT_THAT(ContextsTable(List(true, false)),
              testing::AllOf(testing::HasSubstr("NAME"), testing::HasSubstr("\nreport ")));
}

}  // namespace
}  // namespace carrel::tools
