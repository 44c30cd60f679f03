#include "common/secret.h"

#include <set>

#include "common/test_util.h"

namespace carrel {
namespace {

TEST(SecretTest, RandomBytes_AreAsManyAsAskedAndNeverTheSame) {
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) {
    const std::string bytes = RandomBytes(32);
    EXPECT_EQ(bytes.size(), 32u);
    EXPECT_TRUE(seen.insert(bytes).second);
  }
  EXPECT_EQ(RandomBytes(0), "");
}

TEST(SecretTest, EqualSecrets_SeesEveryByte) {
  const std::string a = RandomBytes(32);
  EXPECT_TRUE(EqualSecrets(a, std::string(a)));
  for (size_t i = 0; i < a.size(); ++i) {
    std::string b = a;
    b[i] = static_cast<char>(b[i] ^ 1);
    EXPECT_FALSE(EqualSecrets(a, b)) << i;
  }
  EXPECT_FALSE(EqualSecrets(a, a.substr(1)));
  EXPECT_TRUE(EqualSecrets("", ""));
}

}  // namespace
}  // namespace carrel
