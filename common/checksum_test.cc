#include "common/checksum.h"

#include "common/test_util.h"

namespace carrel {
namespace {

TEST(Crc32cTest, CheckValue_MatchesRfc3720) {
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(Crc32c(""), 0u);
}

TEST(Crc32cTest, RandomBytes_FastEqualsTableAndSplitsAnywhere) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 50; ++round) {
    std::string bytes(rng() % 3000, '\0');
    for (char& c : bytes) c = static_cast<char>(rng());
    const uint32_t whole = Crc32c(bytes);
    EXPECT_EQ(whole, internal::ExtendCrc32cTable(0, bytes));
    const size_t cut = bytes.empty() ? 0 : rng() % bytes.size();
    EXPECT_EQ(whole, ExtendCrc32c(Crc32c(bytes.substr(0, cut)), bytes.substr(cut)));
  }
}

TEST(Sha256Test, KnownVectors) {
  EXPECT_EQ(Sha256Hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

}  // namespace
}  // namespace carrel
