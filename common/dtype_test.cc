#include "common/dtype.h"

#include "common/test_util.h"

namespace carrel {
namespace {

TEST(Bf16Test, EveryValue_SurvivesTheRoundTrip) {
  for (uint32_t x = 0; x <= 0xffff; ++x) {
    const float f = Bf16ToFloat(static_cast<uint16_t>(x));
    if (std::isnan(f)) {
      EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(f))));
    } else {
      EXPECT_EQ(FloatToBf16(f), x);
    }
  }
}

TEST(Bf16Test, Halfway_RoundsToEven) {
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f808000u)), 0x3f80);  // tie, even below
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f818000u)), 0x3f82);  // tie, even above
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f808001u)), 0x3f81);
}

TEST(F16Test, KnownValues) {
  EXPECT_EQ(F16ToFloat(0x3c00), 1.0f);
  EXPECT_EQ(F16ToFloat(0xc000), -2.0f);
  EXPECT_EQ(F16ToFloat(0x7bff), 65504.0f);
  EXPECT_EQ(F16ToFloat(0x0001), std::ldexp(1.0f, -24));
  EXPECT_EQ(F16ToFloat(0x03ff), std::ldexp(1023.0f, -24));
  EXPECT_EQ(F16ToFloat(0x7c00), INFINITY);
  EXPECT_TRUE(std::isnan(F16ToFloat(0x7e00)));
}

TEST(WidenTest, UnalignedInput_IsRead) {
  std::string bytes("x\x80\x3f\x00\x40", 5);
  float out[2];
  WidenToFloat(DType::kBf16, bytes.data() + 1, 2, out);
  EXPECT_EQ(out[0], 1.0f);
  EXPECT_EQ(out[1], 2.0f);
}

}  // namespace
}  // namespace carrel
