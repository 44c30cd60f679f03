#include "http_api/http_message.h"

#include "absl/strings/str_cat.h"
#include "common/test_util.h"
#include "kvstore/access/right.h"

namespace carrel::http_api {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(ParseTarget, Forms_OfOneTarget_AreTheSame) {
  for (const char* target :
       {"/v1/models", "/v1/models/", "//v1/models", "/v1//models?limit=1", "/v1/models#x",
        "http://127.0.0.1:8080/v1/models", "HTTP://localhost/v1/models?a=b", "/%76%31/model%73"}) {
    const auto at = ParseTarget(target);
    CARREL_ASSERT_OK(at.status()) << target;
    EXPECT_THAT(at->segments, ElementsAre("v1", "models")) << target;
  }
  EXPECT_EQ(ParseTarget("/a?x=1&y=2")->query, "x=1&y=2");
  EXPECT_EQ(ParseTarget("http://host:1/a")->authority, "host:1");
  EXPECT_THAT(ParseTarget("/")->segments, IsEmpty());
  EXPECT_THAT(ParseTarget("/?utm=1")->segments, IsEmpty());
  EXPECT_THAT(ParseTarget("/v1/contexts/a%2Fb%20c")->segments,
              ElementsAre("v1", "contexts", "a/b c"));
  EXPECT_THAT(ParseTarget("/a%zz%4")->segments, ElementsAre("a%zz%4"));
}

TEST(ParseTarget, WhatIsNone_IsRefused) {
  for (const std::string target : {"", "v1/models", "ftp://x/", "http://", "http:///x", "http://x",
                                   "http://user@host/x", "/a b", "/a\x01", "127.0.0.1:80"}) {
    EXPECT_THAT(ParseTarget(target).status(), StatusIs(absl::StatusCode::kInvalidArgument, ""))
        << target;
  }
}

TEST(QueryParameter, IsFoundByItsWholeName_Decoded) {
  EXPECT_EQ(QueryParameter("xname=1&name=a%20b+c&name=d", "name"), "a b c");
  EXPECT_EQ(QueryParameter("n%61me=1", "name"), "1");
  EXPECT_EQ(QueryParameter("name", "name"), "");
  EXPECT_EQ(QueryParameter("", "name"), "");
}

TEST(FindRoute, MethodsAndPaths) {
  const auto find = [](const char* method, const char* target) {
    return FindRoute(method, ParseTarget(target)->segments);
  };
  EXPECT_EQ(RouteCall(*find("GET", "/v1/models").route), "GET /v1/models");
  EXPECT_EQ(RouteCall(*find("HEAD", "/v1/models/").route), "GET /v1/models");
  EXPECT_EQ(find("DELETE", "/v1/contexts/a.b").name, "a.b");
  EXPECT_EQ(RouteCall(*find("GET", "/v1/contexts/text/text").route), "GET /v1/contexts/{}/text");
  // Names of models as hubs have them, with their slash as it is or encoded.
  EXPECT_EQ(find("GET", "/v1/models/owner/model-1.5").name, "owner/model-1.5");
  EXPECT_EQ(find("GET", "/v1/models/owner%2Fmodel-1.5@doc").name, "owner/model-1.5@doc");
  EXPECT_EQ(find("GET", "/v1/contexts/a/b").allow, "");
  const RouteFound wrong = find("PUT", "/v1/contexts");
  EXPECT_EQ(wrong.route, nullptr);
  EXPECT_EQ(wrong.allow, "GET, HEAD, POST, OPTIONS");
  EXPECT_EQ(find("GET", "/v2").allow, "");
  EXPECT_EQ(find("get", "/v1/models").route, nullptr);  // methods have case
}

// Every call that is no open one has its right in the one table, and the table has no other.
TEST(FindRoute, EveryRoute_HasItsRight) {
  int found = 0;
  for (const kvstore::RpcRight& row : kvstore::HttpRights()) {
    const size_t space = row.rpc.find(' ');
    std::string target(row.rpc.substr(space + 1));
    const RouteFound route = FindRoute(row.rpc.substr(0, space), ParseTarget(target)->segments);
    ASSERT_NE(route.route, nullptr) << row.rpc;
    EXPECT_EQ(RouteCall(*route.route), row.rpc);
    EXPECT_FALSE(route.route->open);
    ++found;
  }
  EXPECT_EQ(found, 12);
  for (const char* open : {"/", "/health", "/healthz", "/ready"}) {
    EXPECT_TRUE(FindRoute("GET", ParseTarget(open)->segments).route->open);
    EXPECT_FALSE(kvstore::RightOf(absl::StrCat("GET ", open)).ok());
  }
}

TEST(IsLocalHostOrAddress, Names) {
  for (const char* host : {"localhost", "LOCALHOST", "localhost.", "localhost:8080", "127.0.0.1",
                           "127.0.0.1:80", "10.1.2.3", "[::1]", "[::1]:8080", "[fe80::1]"}) {
    EXPECT_TRUE(IsLocalHostOrAddress(host)) << host;
  }
  for (const char* host :
       {"", "evil.example", "localhost.evil", "127.0.0.1.evil", "127.0.0.1:80@evil", ".", ":80",
        "localhost:evil", "localhost:", "256.1.1.1", "1.2.3", "[", "[]", "[x]", "127.0.0.1:80:80",
        "host.docker.internal", "localhost evil"}) {
    EXPECT_FALSE(IsLocalHostOrAddress(host)) << host;
  }
  EXPECT_TRUE(SameAuthority("Example.org:80", "example.ORG:80"));
  EXPECT_FALSE(SameAuthority("example.org", "example.org:80"));
  EXPECT_FALSE(SameAuthority("", ""));
}

}  // namespace
}  // namespace carrel::http_api
