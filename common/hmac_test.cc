#include "common/hmac.h"

#include "absl/strings/escaping.h"
#include "common/test_util.h"

namespace carrel {
namespace {

// RFC 4231, 4.3, and a key longer than a block (4.7).
TEST(HmacTest, PublishedCases_GiveThePublishedCodes) {
  EXPECT_EQ(absl::BytesToHexString(HmacSha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(
      absl::BytesToHexString(HmacSha256(std::string(131, '\xaa'),
                                        "Test Using Larger Than Block-Size Key - Hash Key First")),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

// RFC 1321, A.5.
TEST(HmacTest, Md5_OfPublishedTexts) {
  EXPECT_EQ(Md5Hex(""), "d41d8cd98f00b204e9800998ecf8427e");
  EXPECT_EQ(Md5Hex("message digest"), "f96b697d7cb7938d525a2f31aaf161d0");
}

}  // namespace
}  // namespace carrel
