#include "kvstore/access/kept_name.h"

#include <random>

#include "common/checksum.h"
#include "common/test_random.h"
#include "gtest/gtest.h"

namespace carrel::kvstore {
namespace {

TEST(KeptNameTest, IsItsKeepersAlone) {
  const std::string digest = Sha256Hex("tokens");
  const std::string alices = KeptName("", "alice", digest), tenants = KeptName("t-", "bob", digest);
  EXPECT_TRUE(IsKept(alices) && IsKept(tenants));
  EXPECT_FALSE(KeptByAnother(alices, "alice"));
  EXPECT_TRUE(KeptByAnother(alices, "bob"));
  EXPECT_TRUE(KeptByAnother(alices, ""));
  EXPECT_FALSE(KeptByAnother(tenants, "bob"));
  EXPECT_EQ(tenants.substr(0, 7), "t-kept-");
  EXPECT_TRUE(SameKeeper(alices, KeptName("", "alice", Sha256Hex("others"))));
  EXPECT_FALSE(SameKeeper(alices, tenants));
  // Older ones do not say whose they are: they may be anybody's else.
  const std::string nobodys = KeptName("", "", digest);
  EXPECT_EQ(nobodys, "kept-" + digest.substr(0, 12));
  EXPECT_TRUE(IsKept(nobodys));
  EXPECT_TRUE(KeptByAnother(nobodys, "alice"));
  EXPECT_TRUE(KeptByAnother(nobodys, ""));
  EXPECT_TRUE(IsNobodysKept(nobodys));
  EXPECT_FALSE(IsNobodysKept(alices) || IsNobodysKept(tenants));
  EXPECT_FALSE(SameKeeper(nobodys, alices));
}

TEST(KeptNameTest, OtherNames_AreNobodys) {
  for (const char* name : {"", "kept-", "kept-alice", "kept-0123456789aZ", "report", "0123456789ab",
                           "x-0123456789ab", "kept-0123456789ab-", "KEPT-0123456789ab",
                           "keep-0123456789ab-0123456789ab", "kept-0123456789ab-0123456789a"}) {
    EXPECT_FALSE(IsKept(name)) << name;
    EXPECT_FALSE(KeptByAnother(name, "alice") || IsNobodysKept(name)) << name;
  }
  std::mt19937_64 random(TestSeed());
  for (int trial = 0; trial < 10000; ++trial) {
    std::string name;
    for (uint64_t i = random() % 40; i > 0; --i) name += "kept-0123456789abcdef"[random() % 21];
    EXPECT_EQ(SameKeeper(name, name), IsKept(name)) << name;
  }
}

}  // namespace
}  // namespace carrel::kvstore
