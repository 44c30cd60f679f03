// Sequences of different contexts, lengths and ways to retrieve that are decoded together, prompts beside
// answers: each gets the tokens, and the logits bit for bit, that it gets alone, whoever joins or leaves.
#include <atomic>
#include <random>

#include "common/status.h"
#include "common/test_util.h"
#include "decoder/generation.h"
#include "kvstore/index/index.h"
#include "tests/world.h"

namespace carrel {
namespace {

using decoder::GenerateOptions;
using decoder::GenerateResult;
using decoder::Generation;

// Ahead of time asks one of four: such sequences go one by one, within the same call.
decoder::RetrievalConfig ConfigOf(int64_t i) {
  decoder::RetrievalConfig config;
  config.want = static_cast<decoder::Want>(1 + i % 3);
  config.prefetch = i % 4 == 3 ? decoder::Prefetch::kSpeculative : decoder::Prefetch::kOff;
  config.selection = select::TopK{16 + 8 * (i % 5)};
  config.dense_layers = static_cast<int32_t>(i % 3);
  return config;
}

// Counts questions and their tokens, and may refuse those of several tokens.
class WatchedStore final : public retrieval::Session {
 public:
  struct Seen {
    std::atomic<int64_t> questions = 0, shared = 0;  // contexts ask side by side
    bool refuse = false;
    bool attends = false;  // as a store in this process does
  };
  WatchedStore(std::unique_ptr<retrieval::Session> store, Seen* seen)
      : store_(std::move(store)), seen_(seen) {}
  absl::StatusOr<retrieval::Opened> Open(const retrieval::OpenRequest& open) override {
    return store_->Open(open);
  }
  absl::StatusOr<retrieval::RequestId> Send(retrieval::Query query) override {
    RETURN_IF_ERROR(See(query));
    return store_->Send(std::move(query));
  }
  bool attends() const override { return seen_->attends; }
  absl::Status Attend(retrieval::Query query, retrieval::AttendReply& reply) override {
    RETURN_IF_ERROR(See(query));
    return store_->Attend(std::move(query), reply);
  }
  absl::StatusOr<retrieval::RequestId> Send(retrieval::Fetch fetch) override {
    return store_->Send(std::move(fetch));
  }
  absl::StatusOr<retrieval::Part> Next(retrieval::RequestId id) override {
    return store_->Next(id);
  }
  void Forget(retrieval::RequestId id) override { store_->Forget(id); }
  bool broken() const override { return store_->broken(); }
  int64_t bytes_sent() const override { return store_->bytes_sent(); }
  int64_t bytes_received() const override { return store_->bytes_received(); }

 private:
  absl::Status See(const retrieval::Query& query) const {
    ++seen_->questions;
    seen_->shared += query.tokens > 1;
    if (query.tokens == 1 || !seen_->refuse) return absl::OkStatus();
    return absl::ResourceExhaustedError("too much at once");
  }

  const std::unique_ptr<retrieval::Session> store_;
  Seen* const seen_;
};

// With weights in bf16, of which few tokens go together, and in blocks of 8 bits.
class TogetherTest : public testing::TestWithParam<bool> {
 protected:
  static constexpr int64_t kSequences = 9;

  void SetUp() override {
    folder_ = FreshTempDir();
    checkpoint_ =
        GetParam() ? &testing_world::QuantizedCheckpoint() : &testing_world::DemoCheckpoint();
    const auto tokens = testing_world::DocumentTokens("registry-512");
    CARREL_ASSERT_OK(tokens);
    for (const auto kind : {kvstore::IndexKind::kFlat, kvstore::IndexKind::kHnsw}) {
      kvstore::IndexParams index;
      index.kind = kind;
      CARREL_ASSERT_OK(
          testing_world::PrefillContext(folder_, std::string(kvstore::IndexKindName(kind)), *tokens,
                                        index, 65536, model::Device::kCpu, *checkpoint_));
    }
    const auto questions = testing_world::Questions("registry-512");
    CARREL_ASSERT_OK(questions);
    for (int64_t i = 0; i < kSequences; ++i) {
      auto decoder = testing_world::EmbeddedDecoder::Open(folder_, i % 2 == 0 ? "flat" : "hnsw",
                                                          ConfigOf(i), {}, nullptr, *checkpoint_);
      CARREL_ASSERT_OK(decoder);
      decoders_.push_back(*std::move(decoder));
      prompts_.push_back((*questions)[static_cast<size_t>(i) % questions->size()].prompt);
      for (int times = 0; i % 4 == 2 && times < 3; ++times) {  // of several blocks
        const std::vector<TokenId> once = prompts_.back();
        prompts_.back().insert(prompts_.back().end(), once.begin(), once.end());
      }
      options_.emplace_back();
      options_[i].max_tokens = 6 + 3 * (i % 4);
      options_[i].keep_logits = true;
      options_[i].ignore_eos = true;
      options_[i].sampling.temperature = i % 2 == 0 ? 0 : 1;
      options_[i].sampling.seed = static_cast<uint64_t>(i);
      const auto alone = decoders_[i]->operator->()->Generate(prompts_[i], options_[i]);
      CARREL_ASSERT_OK(alone);
      alone_.push_back(*alone);
    }
  }

  absl::StatusOr<Generation> Begin(int64_t i) {
    return Generation::Begin(*decoders_[i]->operator->(), prompts_[i], options_[i]);
  }

  void ExpectAsAlone(int64_t i, const GenerateResult& result) {
    EXPECT_EQ(result.ids, alone_[i].ids) << "sequence " << i;
    EXPECT_TRUE(result.logits == alone_[i].logits) << "sequence " << i;
    EXPECT_EQ(result.stop, alone_[i].stop) << "sequence " << i;
    EXPECT_EQ(result.steps, alone_[i].steps) << "sequence " << i;
  }

  std::string folder_;
  const model::Checkpoint* checkpoint_ = nullptr;
  std::vector<std::unique_ptr<testing_world::EmbeddedDecoder>> decoders_;
  std::vector<std::vector<TokenId>> prompts_;
  std::vector<GenerateOptions> options_;
  std::vector<GenerateResult> alone_;
};

TEST_P(TogetherTest, JoiningAndLeaving_EachHasTheBitsOfBeingAlone) {
  std::mt19937_64 rng(TestSeed());
  std::vector<Generation> generations;
  for (int64_t i = 0; i < kSequences; ++i) {
    auto generation = Begin(i);
    CARREL_ASSERT_OK(generation);
    generations.push_back(*std::move(generation));
  }
  for (;;) {
    std::vector<Generation*> ready;
    bool all_done = true;
    for (Generation& one : generations) {
      if (one.done()) continue;
      all_done = false;
      if (rng() % 3 == 0) continue;  // this time it waits
      if (rng() % 5 == 0) {          // or goes alone
        CARREL_ASSERT_OK(one.Step());
      } else {
        ready.push_back(&one);
      }
    }
    if (all_done) break;
    for (const absl::Status& status : Generation::Step(ready)) CARREL_ASSERT_OK(status);
  }
  for (int64_t i = 0; i < kSequences; ++i) ExpectAsAlone(i, generations[i].TakeResult());
}

// Sequences 0, 2, 4 over one context and 1, 3, 5 over another, asking alike.
class SharedQuestionTest : public TogetherTest {
 protected:
  static constexpr int64_t kShared = 6;

  // Opens them anew, answers alone, then all together from the first token on.
  void AnswerTogether(bool refuse, const decoder::ZoneOptions& zone = {}) {
    decoder::RetrievalConfig config;
    config.selection = select::TopK{24};
    config.zone = zone;
    seen_.attends = zone.index() != 0;
    std::vector<Generation> generations;
    for (int64_t i = 0; i < kShared; ++i) {
      auto decoder = testing_world::EmbeddedDecoder::Open(
          folder_, i % 2 == 0 ? "flat" : "hnsw", config, {},
          [&](auto client) { return std::make_unique<WatchedStore>(std::move(client), &seen_); },
          *checkpoint_);
      CARREL_ASSERT_OK(decoder);
      decoders_[i] = *std::move(decoder);
      options_[i].max_tokens = 8;
      const auto alone = decoders_[i]->operator->()->Generate(prompts_[i], options_[i]);
      CARREL_ASSERT_OK(alone);
      alone_[i] = *alone;
      rows_.push_back(RowsAttended(i));
      auto generation = Begin(i);
      CARREL_ASSERT_OK(generation);
      generations.push_back(*std::move(generation));
      while (generations[i].reading_prompt()) CARREL_ASSERT_OK(generations[i].Step());
    }
    seen_.questions = seen_.shared = 0;
    seen_.refuse = refuse;
    std::vector<Generation*> all;
    for (Generation& one : generations) all.push_back(&one);
    while (!all[0]->done()) {
      for (const absl::Status& status : Generation::Step(all)) CARREL_ASSERT_OK(status);
    }
    for (int64_t i = 0; i < kShared; ++i) {
      steps_ = alone_[i].steps;
      ExpectAsAlone(i, generations[i].TakeResult());
      EXPECT_EQ(RowsAttended(i), 2 * rows_[i]) << "sequence " << i;
    }
    layers_ = static_cast<int64_t>(decoders_[0]->operator->()->statistics().layers.size());
  }
  int64_t RowsAttended(int64_t i) {
    int64_t rows = 0;
    for (const auto& layer : decoders_[i]->operator->()->statistics().layers) {
      rows += layer.rows_attended;
    }
    return rows;
  }

  WatchedStore::Seen seen_;
  std::vector<int64_t> rows_;
  int64_t steps_ = 0, layers_ = 0;
};

TEST_P(SharedQuestionTest, OfOneContext_AskOnceAndHaveTheBitsOfBeingAlone) {
  AnswerTogether(/*refuse=*/false);
  EXPECT_EQ(seen_.questions, 2 * layers_ * steps_);
  EXPECT_EQ(seen_.shared, seen_.questions.load());
}

TEST_P(SharedQuestionTest, OfRowsInThisHost_AskOnceToo) {
  AnswerTogether(/*refuse=*/false, decoder::HostZoneOptions());
  EXPECT_EQ(seen_.questions, 2 * layers_ * steps_);
  EXPECT_EQ(seen_.shared, seen_.questions.load());
}

TEST_P(SharedQuestionTest, WhereTheQuestionFails_EachAsksAlone) {
  AnswerTogether(/*refuse=*/true);
  EXPECT_EQ(seen_.questions, (2 + kShared) * layers_ * steps_);
}

TEST_P(TogetherTest, OneIsNotWantedAnyMore_TheOthersGoOn) {
  std::vector<Generation> generations;
  int64_t looks = 0;
  for (int64_t i = 0; i < 3; ++i) {
    if (i == 1) options_[i].wanted = [&looks] { return ++looks < 30; };
    auto generation = Begin(i);
    CARREL_ASSERT_OK(generation);
    generations.push_back(*std::move(generation));
    while (generations[i].reading_prompt()) CARREL_ASSERT_OK(generations[i].Step());
  }
  absl::Status cancelled;
  for (;;) {
    std::vector<Generation*> ready;
    for (Generation& one : generations) {
      if (!one.done() && (&one != &generations[1] || cancelled.ok())) ready.push_back(&one);
    }
    if (ready.empty()) break;
    const std::vector<absl::Status> statuses = Generation::Step(ready);
    for (size_t j = 0; j < ready.size(); ++j) {
      if (ready[j] == &generations[1]) {
        cancelled = statuses[j];
      } else {
        CARREL_ASSERT_OK(statuses[j]);
      }
    }
  }
  EXPECT_THAT(cancelled, StatusIs(absl::StatusCode::kCancelled, "nobody wants the answer"));
  for (const int64_t i : {0, 2}) ExpectAsAlone(i, generations[i].TakeResult());
  // And its decoder answers again.
  options_[1].wanted = nullptr;
  const auto again = decoders_[1]->operator->()->Generate(prompts_[1], options_[1]);
  CARREL_ASSERT_OK(again);
  ExpectAsAlone(1, *again);
}

const auto kNameOf = [](const auto& info) { return info.param ? "Q8_0" : "Bf16"; };
INSTANTIATE_TEST_SUITE_P(Weights, TogetherTest, testing::Bool(), kNameOf);
INSTANTIATE_TEST_SUITE_P(Weights, SharedQuestionTest, testing::Bool(), kNameOf);

}  // namespace
}  // namespace carrel
