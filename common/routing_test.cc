#include "common/routing.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "common/test_util.h"

namespace carrel {
namespace {

TEST(RoutingTest, ContextHeaderValue_IsAsciiAndOfNamesThatStoresTakeTheNameItself) {
  EXPECT_EQ(ContextHeaderValue("team-a_report.2026"), "team-a_report.2026");
  EXPECT_EQ(ContextHeaderValue("a b/%\xc3\xa4\n"), "a%20b%2F%25%C3%A4%0A");
  EXPECT_EQ(ContextHeaderValue(""), "");
}

TEST(RoutingTest, SaysServerIsGone_WhatGrpcSaysItself) {
  EXPECT_TRUE(SaysServerIsGone(absl::CancelledError("CANCELLED")));
  EXPECT_TRUE(SaysServerIsGone(absl::InternalError("Received RST_STREAM with error code 2")));
  EXPECT_TRUE(SaysServerIsGone(absl::UnknownError("Stream removed")));
  EXPECT_FALSE(SaysServerIsGone(absl::OkStatus()));
  EXPECT_FALSE(SaysServerIsGone(absl::InternalError("a fault of the server's own")));
  EXPECT_FALSE(SaysServerIsGone(absl::NotFoundError("no such context")));
}

std::vector<std::string> Named(const std::vector<size_t>& order,
                               const std::vector<std::string>& places) {
  std::vector<std::string> named;
  for (const size_t place : order) named.push_back(places[place]);
  return named;
}

TEST(RoutingTest, PlacesFor_IsTheSameInWhateverOrderPlacesAreGiven) {
  const std::vector<std::string> places = {"a:1", "b:1", "unix:/c"};
  const std::vector<std::string> turned = {"unix:/c", "a:1", "b:1"};
  for (int i = 0; i < 100; ++i) {
    const std::string context = absl::StrCat("context-", i);
    EXPECT_EQ(Named(PlacesFor(context, places), places), Named(PlacesFor(context, turned), turned));
  }
}

TEST(RoutingTest, PlacesFor_OnePlaceLess_MovesOnlyWhatWasThere) {
  const std::vector<std::string> three = {"a:1", "b:1", "c:1"}, two = {"a:1", "c:1"};
  std::map<std::string, int> first;
  for (int i = 0; i < 3000; ++i) {
    const std::string context = absl::StrCat("context-", i);
    const std::string before = Named(PlacesFor(context, three), three)[0];
    const std::string after = Named(PlacesFor(context, two), two)[0];
    ++first[before];
    // Who lost its first goes where its second was.
    const size_t now = before == "b:1" ? 1 : 0;
    EXPECT_EQ(Named(PlacesFor(context, three), three)[now], after) << context;
  }
  for (const std::string& place : three) EXPECT_GT(first[place], 800) << place;
}

}  // namespace
}  // namespace carrel
