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
    std::string bytes(rng() % (round % 2 == 0 ? 3000 : 10000), '\0');
    for (char& c : bytes) c = static_cast<char>(rng());
    const uint32_t whole = Crc32c(bytes);
    EXPECT_EQ(whole, internal::ExtendCrc32cTable(0, bytes));
    const size_t cut = bytes.empty() ? 0 : rng() % bytes.size();
    EXPECT_EQ(whole, ExtendCrc32c(Crc32c(bytes.substr(0, cut)), bytes.substr(cut)));
  }
}

TEST(Crc32cTest, Chunks_AnyNumberAndLastLength_EqualTheTable) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 60; ++round) {
    const size_t chunk = 8 * (1 + rng() % 20);
    std::string bytes(rng() % (12 * chunk), '\0');
    for (char& c : bytes) c = static_cast<char>(rng());
    const size_t chunks = (bytes.size() + chunk - 1) / chunk;
    std::vector<uint32_t> crcs(chunks + 1, 7);
    Crc32cOfChunks(bytes, chunk, crcs.data());
    for (size_t i = 0; i < chunks; ++i) {
      EXPECT_EQ(crcs[i], internal::ExtendCrc32cTable(0, bytes.substr(i * chunk, chunk)));
    }
    EXPECT_EQ(crcs[chunks], 7u);  // and no further
  }
}

TEST(Sha256Test, KnownVectors) {
  EXPECT_EQ(Sha256Hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

}  // namespace
}  // namespace carrel
