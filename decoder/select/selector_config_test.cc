#include "decoder/select/selector_config.h"

#include "common/test_util.h"
#include "decoder/select/method_type.h"

namespace carrel::decoder {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Where keys cross a bus: codes choose candidates, whose keys choose rows.
TEST(UsualSelectorTest, AcrossABus_IsHashWithASecondLook_OtherwiseExact) {
  EXPECT_EQ(UsualSelector(false).kind, SelectorKind::kExact);
  const SelectorConfig across = UsualSelector(true);
  EXPECT_EQ(DescribeSelector(across), DescribeSelector(*ParseSelector("hash")));
  EXPECT_EQ(across.oversample, kAutoOversample);
  EXPECT_TRUE(MethodOf(across).reads_keys(across));
}

TEST(ParseSelectorTest, Parameters_ReachTheirMethod) {
  EXPECT_EQ(ParseSelector("hash:codes=stored")->hash.source, HashSource::kStored);
  EXPECT_EQ(ParseSelector("hash")->hash.query, HashQuery::kWeights);
  EXPECT_EQ(ParseSelector("hash:query=signs")->hash.query, HashQuery::kSigns);
  EXPECT_EQ(DescribeSelector(*ParseSelector("hash:query=signs")),
            "hash:codes=auto,query=signs,oversample=auto");
  EXPECT_EQ(ParseSelector("hash:oversample=64")->oversample, 64);
}

TEST(WithOversampleTest, Auto_IsWhatTheZoneSays) {
  EXPECT_EQ(WithOversample(*ParseSelector("hash"), kOversample).oversample, kAutoOversample);
  EXPECT_EQ(WithOversample(*ParseSelector("hash"), 1).oversample, 1);
  EXPECT_EQ(WithOversample(*ParseSelector("hash:oversample=9"), 1).oversample, 9);
}

TEST(DescribeSelectorTest, Hash_SaysWhatChoosesAndHowMany) {
  EXPECT_EQ(DescribeSelector(*ParseSelector("exact")), "exact");
  EXPECT_EQ(DescribeSelector(*ParseSelector("hash:codes=stored,oversample=2")),
            "hash:codes=stored,oversample=2");
  EXPECT_EQ(DescribeSelector(WithOversample(*ParseSelector("hash:bits=64"), 4)),
            "hash:codes=random,bits=64,oversample=auto");
  EXPECT_EQ(DescribeSelector(WithOversample(*ParseSelector("hash:bits=64"), 1)),
            "hash:codes=random,bits=64,oversample=1");
}

TEST(ParseSelectorTest, CodesOfHash_BitsOrSeedMakeThemRandom) {
  EXPECT_EQ(ParseSelector("hash")->hash.source, HashSource::kAuto);
  EXPECT_EQ(ParseSelector("hash:codes=auto,oversample=2")->hash.source, HashSource::kAuto);
  EXPECT_EQ(ParseSelector("hash:bits=64")->hash.source, HashSource::kRandom);
  EXPECT_EQ(ParseSelector("hash:seed=0")->hash.source, HashSource::kRandom);
  EXPECT_EQ(ParseSelector("hash:codes=random")->hash.source, HashSource::kRandom);
}

TEST(ParseSelectorTest, WhatIsNotUnderstood_IsNamed) {
  EXPECT_THAT(ParseSelector("hipp"), StatusIs(kInvalid, "method=hipp is none of exact, hash"));
  EXPECT_THAT(ParseSelector("exact:k=1"),
              StatusIs(kInvalid, "exact has no parameter \"k\", it has none"));
  EXPECT_THAT(ParseSelector("exact:mask=q-head"),
              StatusIs(kInvalid, "exact has no parameter \"mask\""));
  EXPECT_THAT(ParseSelector("hash:bits=100"),
              StatusIs(kInvalid, "bits=100 is not a multiple of 32"));
  EXPECT_THAT(ParseSelector("hash:codes=stored,bits=64"),
              StatusIs(kInvalid, "stored codes have their own bits"));
  EXPECT_THAT(ParseSelector("hash:oversample=0"),
              StatusIs(kInvalid, "oversample: \"0\" is not a number in 1 .. 64"));
  EXPECT_THAT(ParseSelector("hash:codes=learned"),
              StatusIs(kInvalid, "one of auto, random, stored"));
}

}  // namespace
}  // namespace carrel::decoder
