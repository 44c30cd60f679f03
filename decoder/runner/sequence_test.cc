#include "common/test_util.h"
#include "decoder/runner/runner.h"

namespace carrel::decoder {
namespace {

// Rows are numbers of tokens; remembers what it was told.
class FakeSequence final : public Sequence {
 public:
  explicit FakeSequence(bool keeps = true) : Sequence(100), keeps_(keeps) {}
  Runner& runner() override { return runner_; }
  Statistics statistics() const override { return {}; }

  int64_t starts = 0, given_up_last = -1, kept = -1;

 private:
  struct NoRunner final : Runner {
    std::vector<SliceResult> Step(absl::Span<const Slice>) override { return {}; }
  };
  void Start(int64_t give_up) override {
    ++starts;
    given_up_last = give_up;
  }
  bool Keep(int64_t tokens) override {
    if (keeps_) kept = tokens;
    return keeps_;
  }
  std::vector<float> CopyRows(int64_t tokens) const override {
    return std::vector<float>(keeps_ ? static_cast<size_t>(tokens) : 0, 1.0f);
  }
  bool RestoreRows(const std::vector<float>& rows, int64_t tokens) override {
    return static_cast<int64_t>(rows.size()) == tokens;
  }

  const bool keeps_;
  NoRunner runner_;
};

constexpr bool kResume = true;

TEST(SequenceTest, APromptThatGoesOn_KeepsWhatItBeginsWith) {
  FakeSequence sequence;
  EXPECT_EQ(sequence.Sync({1, 2, 3}, kResume, 0), 0);
  sequence.Took({1, 2, 3, 4});
  EXPECT_EQ(sequence.end(), 104);
  EXPECT_EQ(sequence.Sync({1, 2, 3, 4, 9}, kResume, 0), 4);
  EXPECT_EQ(sequence.kept, 4);
  EXPECT_EQ(sequence.Sync({1, 2, 7, 8}, kResume, 0), 2);
  EXPECT_THAT(sequence.tokens(), testing::ElementsAre(1, 2));
  EXPECT_EQ(sequence.starts, 1);
}

TEST(SequenceTest, ThePromptsLastToken_IsAlwaysRead) {
  FakeSequence sequence;
  sequence.Took({1, 2, 3});
  EXPECT_EQ(sequence.Sync({1, 2, 3}, kResume, 0), 2);
  EXPECT_EQ(sequence.Sync({1}, kResume, 0), 0);
}

TEST(SequenceTest, WithoutResume_OrWithAnotherSeam_OrWhereRowsAreNotKept_ItBeginsAnew) {
  FakeSequence sequence;
  sequence.Took({1, 2, 3});
  EXPECT_EQ(sequence.Sync({1, 2, 3, 4}, kResume, 5), 0);
  EXPECT_EQ(sequence.given_up_last, 5);
  EXPECT_EQ(sequence.end(), 95);
  sequence.Took({1, 2, 3});
  EXPECT_EQ(sequence.Sync({1, 2, 3, 4}, !kResume, 5), 0);
  EXPECT_TRUE(sequence.tokens().empty());
  FakeSequence other(/*keeps=*/false);
  other.Took({1, 2, 3});
  EXPECT_EQ(other.Sync({1, 2, 3, 4}, kResume, 0), 0);
  EXPECT_EQ(other.starts, 1);
}

TEST(SequenceTest, WhatIsSaved_ComesBack_AndOtherRowsDoNot) {
  FakeSequence sequence;
  sequence.Sync({1}, !kResume, 3);
  sequence.Took({1, 2, 3});
  SavedSequence saved = sequence.Save();
  EXPECT_EQ(saved.given_up, 3);
  FakeSequence other;
  CARREL_ASSERT_OK(other.Restore(saved));
  EXPECT_EQ(other.tokens(), sequence.tokens());
  EXPECT_EQ(other.given_up(), 3);
  saved.rows.pop_back();
  EXPECT_THAT(other.Restore(saved),
              StatusIs(absl::StatusCode::kDataLoss, "3 tokens has 2 numbers"));
  EXPECT_TRUE(other.tokens().empty());
  FakeSequence without(/*keeps=*/false);
  without.Took({1, 2});
  EXPECT_TRUE(without.Save().tokens.empty());
}

TEST(SequenceTest, NobodyWantsIt_IsCancelled) {
  FakeSequence sequence;
  CARREL_EXPECT_OK(sequence.CheckWanted());
  sequence.set_wanted([] { return false; });
  EXPECT_THAT(sequence.CheckWanted(),
              StatusIs(absl::StatusCode::kCancelled, "nobody wants the answer"));
}

}  // namespace
}  // namespace carrel::decoder
