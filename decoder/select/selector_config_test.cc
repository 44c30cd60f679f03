#include "decoder/select/selector_config.h"

#include "common/test_util.h"

namespace carrel::decoder {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Where keys cross a bus: codes choose candidates, whose keys choose rows.
TEST(UsualSelectorTest, AcrossABus_IsHashWithASecondLook_OtherwiseExact) {
  EXPECT_EQ(UsualSelector(false).kind, SelectorKind::kExact);
  const SelectorConfig across = UsualSelector(true);
  EXPECT_EQ(DescribeSelector(across), DescribeSelector(*ParseSelector("hash")));
  EXPECT_EQ(across.hash.oversample, kAutoOversample);
  EXPECT_TRUE(SelectorReadsKeys(across));
}

TEST(ParseSelectorTest, NameAlone_HasThePublishedParameters) {
  const auto hip = ParseSelector("hip");
  CARREL_ASSERT_OK(hip);
  EXPECT_EQ(hip->kind, SelectorKind::kHip);
  EXPECT_EQ(hip->hip.block_k, 2);
  EXPECT_EQ(hip->hip.refresh, 1);
  const auto infinite = ParseSelector("infinitehip");
  CARREL_ASSERT_OK(infinite);
  ASSERT_EQ(infinite->infinite_hip.stages.size(), 3u);
  EXPECT_EQ(infinite->infinite_hip.stages[0].chunk, 256);
  EXPECT_EQ(infinite->infinite_hip.stages[0].survivors, 32768);
  EXPECT_EQ(infinite->infinite_hip.stages[1].chunk, 32);
  EXPECT_EQ(infinite->infinite_hip.stages[2].refresh, 4);
}

TEST(ParseSelectorTest, Parameters_ReachTheirMethod) {
  const auto hip = ParseSelector("hip:block_k=4,refresh=8,ensemble=5,votes=3,jitter=0.25,widen=16");
  CARREL_ASSERT_OK(hip);
  EXPECT_EQ(hip->hip.block_k, 4);
  EXPECT_EQ(hip->hip.refresh, 8);
  EXPECT_EQ(hip->hip.ensemble, 5);
  EXPECT_EQ(hip->hip.votes, 3);
  EXPECT_EQ(hip->hip.jitter, 0.25);
  EXPECT_EQ(hip->hip.widen, 16);
  const auto flash = ParseSelector("infinitehip:preset=flash,survivors=scaled");
  CARREL_ASSERT_OK(flash);
  EXPECT_EQ(flash->infinite_hip.stages[0].refresh, 96);
  EXPECT_EQ(flash->infinite_hip.stages[0].multiple, 16);
  EXPECT_EQ(flash->infinite_hip.stages[2].multiple, 1);
  const auto stages = ParseSelector("infinitehip:stages=64:500:4/16:1x:1");
  CARREL_ASSERT_OK(stages);
  ASSERT_EQ(stages->infinite_hip.stages.size(), 2u);
  EXPECT_EQ(stages->infinite_hip.stages[0].chunk, 64);
  EXPECT_EQ(stages->infinite_hip.stages[0].survivors, 500);
  EXPECT_EQ(stages->infinite_hip.stages[0].refresh, 4);
  EXPECT_EQ(stages->infinite_hip.stages[1].multiple, 1);
  EXPECT_EQ(hip->mask, SelectorMask::kKvHead);
  for (const char* text : {"hip:mask=q-head,block_k=4", "infinitehip:stages=8:1x:1,mask=q-head"}) {
    EXPECT_EQ(ParseSelector(text)->mask, SelectorMask::kQHead) << text;
  }
  EXPECT_EQ(DescribeSelector(*ParseSelector("hip:mask=q-head")), "hip:mask=q-head");
  EXPECT_EQ(DescribeSelector(*ParseSelector("infinitehip")), "infinitehip");
  const auto channels = ParseSelector("channels:by=qk,share=16");
  CARREL_ASSERT_OK(channels);
  EXPECT_EQ(channels->channels.by, ChannelScore::kQK);
  EXPECT_EQ(channels->channels.share, 16);
  EXPECT_EQ(channels->channels.oversample, kAutoOversample);
  EXPECT_EQ(ParseSelector("channels:oversample=auto")->channels.oversample, kAutoOversample);
  EXPECT_EQ(ParseSelector("channels:oversample=7")->channels.oversample, 7);
  EXPECT_EQ(ParseSelector("hash:codes=stored")->hash.source, HashSource::kStored);
  EXPECT_EQ(ParseSelector("hash")->hash.query, HashQuery::kWeights);
  EXPECT_EQ(ParseSelector("hash:query=signs")->hash.query, HashQuery::kSigns);
  EXPECT_EQ(DescribeSelector(*ParseSelector("hash:query=signs")),
            "hash:codes=auto,query=signs,oversample=auto");
  EXPECT_EQ(ParseSelector("hash:oversample=64")->hash.oversample, 64);
  EXPECT_EQ(ParseSelector("pages")->pages.rows, 16);
  EXPECT_EQ(ParseSelector("pages:rows=32,mask=q-head")->pages.rows, 32);
  EXPECT_EQ(ParseSelector("landmarks:outliers=48")->landmarks.outliers, 48);
  EXPECT_EQ(DescribeSelector(*ParseSelector("landmarks:mask=q-head")),
            "landmarks:chunk=8,outliers=0,mask=q-head");
}

TEST(OversampleOfTest, Auto_IsWhatTheZoneSays) {
  EXPECT_EQ(OversampleOf(*ParseSelector("hash")), kAutoOversample);
  EXPECT_EQ(OversampleOf(*ParseSelector("hash"), 1), 1);
  EXPECT_EQ(OversampleOf(*ParseSelector("channels")), kOversample);
  EXPECT_EQ(OversampleOf(*ParseSelector("channels"), 1), 1);
  EXPECT_EQ(OversampleOf(*ParseSelector("hash:oversample=9"), 1), 9);
  EXPECT_EQ(OversampleOf(*ParseSelector("exact")), 1);
  EXPECT_EQ(WithOversample(*ParseSelector("channels"), 3).channels.oversample, 3);
}

TEST(DescribeSelectorTest, HashAndChannels_SayWhatChoosesAndHowMany) {
  EXPECT_EQ(DescribeSelector(*ParseSelector("exact")), "exact");
  EXPECT_EQ(DescribeSelector(*ParseSelector("hash:codes=stored,oversample=2")),
            "hash:codes=stored,oversample=2");
  EXPECT_EQ(DescribeSelector(WithOversample(*ParseSelector("hash:bits=64"), 4)),
            "hash:codes=random,bits=64,oversample=auto");
  EXPECT_EQ(DescribeSelector(WithOversample(*ParseSelector("hash:bits=64"), 1)),
            "hash:codes=random,bits=64,oversample=1");
  EXPECT_EQ(DescribeSelector(*ParseSelector("channels:by=qk")),
            "channels:by=qk,share=4,oversample=auto");
}

TEST(ParseSelectorTest, CodesOfHash_BitsOrSeedMakeThemRandom) {
  EXPECT_EQ(ParseSelector("hash")->hash.source, HashSource::kAuto);
  EXPECT_EQ(ParseSelector("hash:codes=auto,oversample=2")->hash.source, HashSource::kAuto);
  EXPECT_EQ(ParseSelector("hash:bits=64")->hash.source, HashSource::kRandom);
  EXPECT_EQ(ParseSelector("hash:seed=0")->hash.source, HashSource::kRandom);
  EXPECT_EQ(ParseSelector("hash:codes=random")->hash.source, HashSource::kRandom);
}

TEST(ParseSelectorTest, WhatIsNotUnderstood_IsNamed) {
  EXPECT_THAT(ParseSelector("hipp"), StatusIs(kInvalid, "method=hipp is none of exact, hip"));
  EXPECT_THAT(ParseSelector("exact:k=1"),
              StatusIs(kInvalid, "exact has no parameter \"k\", it has none"));
  EXPECT_THAT(ParseSelector("hip:bits=1"), StatusIs(kInvalid, "hip has no parameter \"bits\""));
  EXPECT_THAT(ParseSelector("hip:block_k=0"),
              StatusIs(kInvalid, "block_k: \"0\" is not a number in 1 .. 1024"));
  EXPECT_THAT(ParseSelector("hip:jitter=2"),
              StatusIs(kInvalid, "jitter: \"2\" is not a number in 0 .. 1"));
  EXPECT_THAT(ParseSelector("hip:ensemble=2,votes=3"),
              StatusIs(kInvalid, "votes=3 exceeds ensemble=2"));
  EXPECT_THAT(ParseSelector("hip:mask=head"), StatusIs(kInvalid, "one of kv-head, q-head"));
  EXPECT_THAT(ParseSelector("exact:mask=q-head"),
              StatusIs(kInvalid, "exact has no parameter \"mask\""));
  EXPECT_THAT(ParseSelector("infinitehip:preset=slow"),
              StatusIs(kInvalid, "one of default, fast, flash"));
  EXPECT_THAT(ParseSelector("infinitehip:stages=8:64:1"), StatusIs(kInvalid, "the last 1x"));
  EXPECT_THAT(ParseSelector("infinitehip:stages=8:1x"),
              StatusIs(kInvalid, "CHUNK:SURVIVORS:REFRESH"));
  EXPECT_THAT(ParseSelector("infinitehip:stages=0:1x:1"),
              StatusIs(kInvalid, "CHUNK:SURVIVORS:REFRESH"));
  EXPECT_THAT(ParseSelector("infinitehip:stages=8:1x:1,preset=fast"),
              StatusIs(kInvalid, "stages stand instead"));
  EXPECT_THAT(ParseSelector("hash:bits=100"),
              StatusIs(kInvalid, "bits=100 is not a multiple of 32"));
  EXPECT_THAT(ParseSelector("hash:codes=stored,bits=64"),
              StatusIs(kInvalid, "stored codes have their own bits"));
  EXPECT_THAT(ParseSelector("hash:oversample=0"),
              StatusIs(kInvalid, "oversample: \"0\" is not a number in 1 .. 64"));
  EXPECT_THAT(ParseSelector("channels:oversample=65"),
              StatusIs(kInvalid, "oversample: \"65\" is not a number in 1 .. 64"));
  EXPECT_THAT(ParseSelector("hash:codes=learned"),
              StatusIs(kInvalid, "one of auto, random, stored"));
  EXPECT_THAT(ParseSelector("channels:share=2"),
              StatusIs(kInvalid, "share: \"2\" is not a number in 4 .. 16"));
}

}  // namespace
}  // namespace carrel::decoder
