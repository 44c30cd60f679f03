#include "model/tokenizer/unicode.h"

#include "common/test_util.h"
#include "model/tokenizer/byte_alphabet.h"
#include "model/tokenizer/tokenizer_test_util.h"

namespace carrel::model {
namespace {

TEST(Unicode, Nfc_DecomposedText_IsComposed) {
  EXPECT_EQ(*NormalizeNfc("plain"), "plain");
  EXPECT_EQ(*NormalizeNfc("e\u0301"), "\u00E9");
  EXPECT_EQ(*NormalizeNfc("\u212B"), "\u00C5");                // angstrom sign
  EXPECT_EQ(*NormalizeNfc("\u1112\u1161\u11AB"), "\uD55C");    // Hangul
  EXPECT_EQ(*NormalizeNfc("q\u0307\u0323"), "q\u0323\u0307");  // canonical order
  EXPECT_EQ(*NormalizeNfc("\uFB01\u2460"), "\uFB01\u2460");    // compatibility forms stay
  EXPECT_EQ(*NormalizeNfc(std::string("\0e\u0301", 4)), std::string("\0\u00E9", 3));
}

TEST(Unicode, Classes_KnownCharacters_AsInTheStandard) {
  for (const uint32_t c : {0x09u, 0x20u, 0x85u, 0xA0u, 0x2003u, 0x3000u}) {
    EXPECT_TRUE(IsWhiteSpace(c)) << c;
  }
  for (const uint32_t c : {uint32_t{'a'}, 0x180Eu, 0x200Bu, 0xFEFFu}) {
    EXPECT_FALSE(IsWhiteSpace(c)) << c;
  }
  for (const uint32_t c :
       {uint32_t{'_'}, uint32_t{'7'}, 0xE9u, 0x301u, 0x4E2Du, 0x2160u, 0x24B6u}) {
    EXPECT_TRUE(IsWordCharacter(c)) << c;
  }
  for (const uint32_t c : {uint32_t{' '}, uint32_t{'-'}, 0xB2u, 0x20ACu, 0x1F600u}) {
    EXPECT_FALSE(IsWordCharacter(c)) << c;
  }
}

TEST(ByteAlphabet, EveryByte_RoundTrip_IsIdentity) {
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes.push_back(static_cast<char>(byte));
  const std::string token = TokenOfBytes(bytes);
  EXPECT_EQ(BytesOfToken(token), bytes);
  EXPECT_EQ(TokenOfBytes(" \n\xC3"), "\u0120\u010A\u00C3");
  EXPECT_EQ(BytesOfToken("a b"), std::nullopt);     // a space is not of the alphabet
  EXPECT_EQ(BytesOfToken("\u0144"), std::nullopt);  // one above its last character
  EXPECT_EQ(BytesOfToken("\u2581"), std::nullopt);
}

}  // namespace
}  // namespace carrel::model
