#include "common/http_proxy.h"

#include <cstdlib>

#include "common/test_util.h"

namespace carrel {
namespace {

class HttpProxyTest : public testing::Test {
 protected:
  void SetUp() override { Clear(); }
  void TearDown() override { Clear(); }
  static void Clear() {
    for (const char* variable :
         {"grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"}) {
      unsetenv(variable);
    }
  }
};

TEST_F(HttpProxyTest, HostOf_TakesSchemesPortsAndBrackets) {
  EXPECT_EQ(HostOf("127.0.0.1:7400"), "127.0.0.1");
  EXPECT_EQ(HostOf("dns:///store.example:7400"), "store.example");
  EXPECT_EQ(HostOf("[::1]:7400"), "::1");
  EXPECT_EQ(HostOf("::1"), "::1");
  EXPECT_EQ(HostOf("localhost"), "localhost");
  EXPECT_EQ(HostOf("unix:/run/carrel.sock"), "");
}

TEST_F(HttpProxyTest, LoopbackNeverNeedsAProxy) {
  setenv("http_proxy", "http://10.0.0.1:3128", 1);
  for (const char* address : {"127.0.0.1:1", "127.8.9.10:1", "localhost:1", "LOCALHOST:1",
                              "localhost.:1", "a.localhost:1", "[::1]:1", "unix:/s"}) {
    EXPECT_TRUE(NeedsNoProxy(address)) << address;
    EXPECT_EQ(ProxyHint(address), "") << address;
  }
  for (const char* address : {"128.0.0.1:1", "192.0.2.7:1", "[2001:db8::1]:1"}) {
    EXPECT_FALSE(NeedsNoProxy(address)) << address;
  }
}

TEST_F(HttpProxyTest, Hint_NamesTheVariableThatApplies) {
  EXPECT_EQ(ProxyHint("192.0.2.7:7400"), "");
  setenv("http_proxy", "http://me:secret@proxy.example:3128", 1);
  EXPECT_EQ(
      ProxyHint("192.0.2.7:7400"),
      " (http_proxy=proxy.example:3128 sends it through a proxy; no_proxy=192.0.2.7 goes past "
      "it)");
  setenv("grpc_proxy", "http://other:1", 1);
  EXPECT_THAT(ProxyHint("192.0.2.7:7400"), testing::HasSubstr("grpc_proxy=http://other:1"));
  setenv("no_proxy", "10.0.0.0/8,192.0.2.7", 1);
  EXPECT_EQ(ProxyHint("192.0.2.7:7400"), "");
  EXPECT_NE(ProxyHint("10.1.2.3:7400"), "");  // as gRPC reads it
}

}  // namespace
}  // namespace carrel
