#include "common/dtype.h"

#include "common/f16.h"
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

TEST(F16Test, EveryValue_SurvivesTheRoundTrip) {
  for (uint32_t x = 0; x <= 0xffff; ++x) {
    const float f = F16ToFloat(static_cast<uint16_t>(x));
    if (std::isnan(f)) {
      EXPECT_TRUE(std::isnan(F16ToFloat(FloatToF16(f))));
    } else {
      EXPECT_EQ(FloatToF16(f), x);
    }
  }
}

TEST(F16Test, BetweenTwoValues_RoundsToTheNearerAndTiesToEven) {
  for (uint32_t x = 0; x < 0x7bff; ++x) {
    const float low = F16ToFloat(static_cast<uint16_t>(x));
    const float high = F16ToFloat(static_cast<uint16_t>(x + 1));
    const float middle = (low + high) / 2;  // exact
    EXPECT_EQ(FloatToF16(middle), x % 2 == 0 ? x : x + 1);
    EXPECT_EQ(FloatToF16(std::nextafter(middle, low)), x);
    EXPECT_EQ(FloatToF16(std::nextafter(middle, high)), x + 1);
    EXPECT_EQ(FloatToF16(-middle), FloatToF16(middle) | 0x8000);
  }
  EXPECT_EQ(FloatToF16(65519.0f), 0x7bff);
  EXPECT_EQ(FloatToF16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToF16(1e30f), 0x7c00);
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

TEST(WidenTest, AnyCount_WidensEachAndNoMore) {
  for (int64_t count = 0; count < 70; ++count) {
    std::vector<uint16_t> x(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) x[static_cast<size_t>(i)] = static_cast<uint16_t>(997 * i);
    for (const DType dtype : {DType::kF16, DType::kBf16}) {
      std::vector<float> out(static_cast<size_t>(count + 1), -7.0f);
      WidenToFloat(dtype, x.data(), count, out.data());
      for (size_t i = 0; i < x.size(); ++i) {
        const float expected = dtype == DType::kF16 ? F16ToFloat(x[i]) : Bf16ToFloat(x[i]);
        EXPECT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(expected));
      }
      EXPECT_EQ(out.back(), -7.0f);
    }
  }
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
