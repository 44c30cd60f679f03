#include "lab/methods/options.h"

#include "common/test_util.h"
#include "decoder/select/selector_config.h"
#include "lab/methods/channel_labels.h"
#include "lab/methods/hip_selector.h"
#include "lab/methods/infinite_hip_selector.h"
#include "lab/methods/landmark_selector.h"
#include "lab/methods/page_selector.h"

namespace carrel::decoder {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST(MethodOptionsTest, NameAlone_HasThePublishedParameters) {
  const auto hip = ParseSelector("hip");
  CARREL_ASSERT_OK(hip);
  EXPECT_EQ(hip->kind, SelectorKind::kHip);
  EXPECT_EQ(OptionsOf<HipConfig>(*hip).block_k, 2);
  EXPECT_EQ(OptionsOf<HipConfig>(*hip).refresh, 1);
  const auto infinite = ParseSelector("infinitehip");
  CARREL_ASSERT_OK(infinite);
  ASSERT_EQ(OptionsOf<InfiniteHipConfig>(*infinite).stages.size(), 3u);
  EXPECT_EQ(OptionsOf<InfiniteHipConfig>(*infinite).stages[0].chunk, 256);
  EXPECT_EQ(OptionsOf<InfiniteHipConfig>(*infinite).stages[0].survivors, 32768);
  EXPECT_EQ(OptionsOf<InfiniteHipConfig>(*infinite).stages[1].chunk, 32);
  EXPECT_EQ(OptionsOf<InfiniteHipConfig>(*infinite).stages[2].refresh, 4);
}

TEST(MethodOptionsTest, Parameters_ReachTheirMethod) {
  const auto hip = ParseSelector("hip:block_k=4,refresh=8,ensemble=5,votes=3,jitter=0.25,widen=16");
  CARREL_ASSERT_OK(hip);
  EXPECT_EQ(OptionsOf<HipConfig>(*hip).block_k, 4);
  EXPECT_EQ(OptionsOf<HipConfig>(*hip).refresh, 8);
  EXPECT_EQ(OptionsOf<HipConfig>(*hip).ensemble, 5);
  EXPECT_EQ(OptionsOf<HipConfig>(*hip).votes, 3);
  EXPECT_EQ(OptionsOf<HipConfig>(*hip).jitter, 0.25);
  EXPECT_EQ(OptionsOf<HipConfig>(*hip).widen, 16);
  const auto flash = ParseSelector("infinitehip:preset=flash,survivors=scaled");
  CARREL_ASSERT_OK(flash);
  EXPECT_EQ(OptionsOf<InfiniteHipConfig>(*flash).stages[0].refresh, 96);
  EXPECT_EQ(OptionsOf<InfiniteHipConfig>(*flash).stages[0].multiple, 16);
  EXPECT_EQ(OptionsOf<InfiniteHipConfig>(*flash).stages[2].multiple, 1);
  const auto stages = ParseSelector("infinitehip:stages=64:500:4/16:1x:1");
  CARREL_ASSERT_OK(stages);
  ASSERT_EQ(OptionsOf<InfiniteHipConfig>(*stages).stages.size(), 2u);
  EXPECT_EQ(OptionsOf<InfiniteHipConfig>(*stages).stages[0].chunk, 64);
  EXPECT_EQ(OptionsOf<InfiniteHipConfig>(*stages).stages[0].survivors, 500);
  EXPECT_EQ(OptionsOf<InfiniteHipConfig>(*stages).stages[0].refresh, 4);
  EXPECT_EQ(OptionsOf<InfiniteHipConfig>(*stages).stages[1].multiple, 1);
  EXPECT_EQ(hip->mask, SelectorMask::kKvHead);
  for (const char* text : {"hip:mask=q-head,block_k=4", "infinitehip:stages=8:1x:1,mask=q-head"}) {
    EXPECT_EQ(ParseSelector(text)->mask, SelectorMask::kQHead) << text;
  }
  EXPECT_EQ(DescribeSelector(*ParseSelector("hip:mask=q-head")), "hip:mask=q-head");
  EXPECT_EQ(DescribeSelector(*ParseSelector("infinitehip")), "infinitehip");
  const auto channels = ParseSelector("channels:by=qk,share=16");
  CARREL_ASSERT_OK(channels);
  EXPECT_EQ(OptionsOf<ChannelConfig>(*channels).by, ChannelScore::kQK);
  EXPECT_EQ(OptionsOf<ChannelConfig>(*channels).share, 16);
  EXPECT_EQ(channels->oversample, kAutoOversample);
  EXPECT_EQ(ParseSelector("channels:oversample=auto")->oversample, kAutoOversample);
  EXPECT_EQ(ParseSelector("channels:oversample=7")->oversample, 7);
  EXPECT_EQ(OptionsOf<PageConfig>(*ParseSelector("pages")).rows, 16);
  EXPECT_EQ(OptionsOf<PageConfig>(*ParseSelector("pages:rows=32,mask=q-head")).rows, 32);
  EXPECT_EQ(OptionsOf<LandmarkConfig>(*ParseSelector("landmarks:outliers=48")).outliers, 48);
  EXPECT_EQ(DescribeSelector(*ParseSelector("landmarks:mask=q-head")),
            "landmarks:chunk=8,outliers=0,mask=q-head");
}

TEST(WithOversampleTest, Channels_AutoIsWhatTheZoneSays) {
  EXPECT_EQ(WithOversample(*ParseSelector("channels"), 1).oversample, 1);
  EXPECT_EQ(WithOversample(*ParseSelector("channels"), 3).oversample, 3);
}

TEST(DescribeSelectorTest, Channels_SayWhatChoosesAndHowMany) {
  EXPECT_EQ(DescribeSelector(*ParseSelector("channels:by=qk")),
            "channels:by=qk,share=4,oversample=auto");
}

TEST(MethodOptionsTest, WhatIsNotUnderstood_IsNamed) {
  EXPECT_THAT(ParseSelector("hip:bits=1"), StatusIs(kInvalid, "hip has no parameter \"bits\""));
  EXPECT_THAT(ParseSelector("hip:block_k=0"),
              StatusIs(kInvalid, "block_k: \"0\" is not a number in 1 .. 1024"));
  EXPECT_THAT(ParseSelector("hip:jitter=2"),
              StatusIs(kInvalid, "jitter: \"2\" is not a number in 0 .. 1"));
  EXPECT_THAT(ParseSelector("hip:ensemble=2,votes=3"),
              StatusIs(kInvalid, "votes=3 exceeds ensemble=2"));
  EXPECT_THAT(ParseSelector("hip:mask=head"), StatusIs(kInvalid, "one of kv-head, q-head"));
  EXPECT_THAT(ParseSelector("infinitehip:preset=slow"),
              StatusIs(kInvalid, "one of default, fast, flash"));
  EXPECT_THAT(ParseSelector("infinitehip:stages=8:64:1"), StatusIs(kInvalid, "the last 1x"));
  EXPECT_THAT(ParseSelector("infinitehip:stages=8:1x"),
              StatusIs(kInvalid, "CHUNK:SURVIVORS:REFRESH"));
  EXPECT_THAT(ParseSelector("infinitehip:stages=0:1x:1"),
              StatusIs(kInvalid, "CHUNK:SURVIVORS:REFRESH"));
  EXPECT_THAT(ParseSelector("infinitehip:stages=8:1x:1,preset=fast"),
              StatusIs(kInvalid, "stages stand instead"));
  EXPECT_THAT(ParseSelector("channels:oversample=65"),
              StatusIs(kInvalid, "oversample: \"65\" is not a number in 1 .. 64"));
  EXPECT_THAT(ParseSelector("channels:share=2"),
              StatusIs(kInvalid, "share: \"2\" is not a number in 4 .. 16"));
}

}  // namespace
}  // namespace carrel::decoder
