#include "model/tokenizer/utf8.h"

#include "common/test_util.h"
#include "model/tokenizer/tokenizer_test_util.h"

namespace carrel::model {
namespace {

TEST(Utf8, Decode_EveryCodePoint_GivesItBack) {
  for (uint32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    const std::string bytes = EncodeUtf8(c);
    const Utf8Char first = DecodeUtf8(bytes + "x");
    const Utf8Char last = DecodeLastUtf8("x" + bytes);
    ASSERT_TRUE(first.code_point == c && first.size == bytes.size()) << c;
    ASSERT_TRUE(last.code_point == c && last.size == bytes.size()) << c;
  }
}

TEST(Utf8, Validate_BadSequence_NamesOffset) {
  const std::vector<std::pair<std::string, size_t>> bad = {
      {"ab\xFF", 2},                    // never a byte of UTF-8
      {"\x80", 0},                      // continuation alone
      {"a\xC0\xAF", 1},                 // overlong
      {"a\xE0\x9F\xBF", 1},             // overlong
      {"\xED\xA0\x80", 0},              // surrogate
      {"\xC3\xA9\xF4\x90\x80\x80", 2},  // above U+10FFFF
      {"xyz\xE2\x82", 3},               // cut off
      {"\xF0\x9F\x98z", 0},
  };
  for (const auto& [bytes, offset] : bad) {
    EXPECT_THAT(ValidateUtf8(bytes), StatusIs(absl::StatusCode::kInvalidArgument,
                                              absl::StrCat("byte offset ", offset, " of")));
  }
  CARREL_EXPECT_OK(ValidateUtf8(std::string("\0 \xC3\xA9 \xED\x9F\xBF \xF4\x8F\xBF\xBF", 14)));
}

TEST(Utf8, CompleteSize_PrefixOfCharacter_IsHeldBack) {
  EXPECT_EQ(CompleteUtf8Size(""), 0u);
  EXPECT_EQ(CompleteUtf8Size("a\xC3"), 1u);
  EXPECT_EQ(CompleteUtf8Size("a\xC3\xA9"), 3u);
  EXPECT_EQ(CompleteUtf8Size("\xE2\x82"), 0u);
  EXPECT_EQ(CompleteUtf8Size("\xE2\x82\xAC\xF0\x9F\x98"), 3u);
  EXPECT_EQ(CompleteUtf8Size("\xF0\x9F\x98\x80"), 4u);
}

TEST(Utf8, CompleteSize_NothingCanComplete_IsHandedOut) {
  EXPECT_EQ(CompleteUtf8Size("a\x80"), 2u);
  EXPECT_EQ(CompleteUtf8Size("\x80\x80\x80\x80"), 4u);
  EXPECT_EQ(CompleteUtf8Size("\xFF"), 1u);
  EXPECT_EQ(CompleteUtf8Size("\xE0\x80"), 2u);  // the second byte would have to be A0..BF
  EXPECT_EQ(CompleteUtf8Size("\xED\xA0"), 2u);
  EXPECT_EQ(CompleteUtf8Size("\xF4\x90\x80"), 3u);
}

// By definition: a cut inside the text holds back exactly the bytes of a begun character.
TEST(Utf8, CompleteSize_RandomTextCutAnywhere_IsLastBoundary) {
  std::mt19937_64 rng(TestSeed());
  const std::string text = RandomUtf8(rng, 300);
  size_t boundary = 0;
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    while (boundary < cut) {
      const size_t next = boundary + DecodeUtf8(absl::string_view(text).substr(boundary)).size;
      if (next > cut) break;
      boundary = next;
    }
    EXPECT_EQ(CompleteUtf8Size(absl::string_view(text).substr(0, cut)), boundary);
  }
}

}  // namespace
}  // namespace carrel::model
