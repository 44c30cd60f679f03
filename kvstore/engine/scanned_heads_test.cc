// Heads that are scanned in 8 bits, through sessions: what is answered does not depend on what is kept.
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/test_util.h"
#include "kvstore/engine/engine.h"
#include "kvstore/engine/test_context.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kTokens = 5;

class ScannedHeadsTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = FreshTempDir();
    RandomContextSpec spec;
    spec.tokens = 1700;
    spec.segment_tokens = 300;
    spec.summary_rows = 20;
    spec.seed = TestSeed();
    context_ = std::make_unique<RandomContext>(spec);
    queries_ = context_->Queries(kTokens, spec.seed + 1, 3);
  }

  std::unique_ptr<Engine> MakeEngine(int64_t memory_budget_bytes, int threads) const {
    EngineConfig config;
    config.memory_budget_bytes = memory_budget_bytes;
    config.search_threads = threads;
    const std::string folder = absl::StrCat(folder_, "/", memory_budget_bytes);
    std::filesystem::create_directories(folder);
    return *Engine::Create(config, MakeStore(folder, {context_.get()}));
  }
  std::shared_ptr<Session> Open(Engine& engine) const {
    auto session = engine.OpenSession(context_->Opening());
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *session : nullptr;
  }

  // Of tokens [first, first + tokens).
  QueryRequest Request(Want want, const select::Selection& selection, int64_t first,
                       int64_t tokens) const {
    const int64_t numbers = context_->spec().shape.q_heads * context_->spec().shape.head_dim;
    QueryRequest request;
    request.layer = Layer(1);
    request.tokens = tokens;
    request.queries.assign(queries_.begin() + first * numbers,
                           queries_.begin() + (first + tokens) * numbers);
    request.selection = selection;
    request.want = want;
    request.estimate = want == Want::kAttend;
    return request;
  }
  static std::vector<CollectedHead> Answer(Session& session, const QueryRequest& request) {
    auto answer = AskAndCollect(session, 1, request);
    EXPECT_TRUE(answer.ok()) << answer.status();
    if (!answer.ok()) return {};
    // Where parts end is the whole reply's matter.
    for (CollectedHead& head : answer->heads) head.pieces = 0;
    return std::move(answer->heads);
  }
  static std::vector<select::Selection> Selections() {
    return {select::TopK{20},
            select::TopK{.rows = 200, .of_head = {30, 200}},
            select::TopK{205},
            select::Range{.below = 4, .max_rows = 1200},
            select::Mass{.share = 0.5, .max_rows = 1200},
            select::TopK{1700}};
  }

  std::string folder_;
  std::unique_ptr<RandomContext> context_;
  std::vector<float> queries_;
};

TEST_F(ScannedHeadsTest, Answers_DoNotDependOnRoomThreadsOrTokensAskedTogether) {
  const auto roomy = MakeEngine(int64_t{1} << 40, 3), full = MakeEngine(int64_t{1} << 20, 1);
  const auto of_roomy = Open(*roomy), of_full = Open(*full);
  for (const select::Selection& selection : Selections()) {
    for (const Want want : {Want::kIds, Want::kRows, Want::kAttend}) {
      const auto together = Answer(*of_roomy, Request(want, selection, 0, kTokens));
      EXPECT_EQ(Answer(*of_full, Request(want, selection, 0, kTokens)), together);
      std::vector<CollectedHead> alone;
      for (int64_t token = 0; token < kTokens; ++token) {
        const auto one =
            Answer(token % 2 == 0 ? *of_roomy : *of_full, Request(want, selection, token, 1));
        alone.insert(alone.end(), one.begin(), one.end());
      }
      EXPECT_EQ(alone, together);
    }
  }
  const int64_t heads = context_->spec().shape.kv_heads, rows = context_->spec().tokens;
  EXPECT_GE(roomy->Statistics().index_bytes(), heads * rows * 36);
  EXPECT_EQ(full->Statistics().index_bytes(), 0);
}

TEST_F(ScannedHeadsTest, MeasuredMass_IsExactAndChangesNoRow) {
  const auto engine = MakeEngine(int64_t{1} << 40, 2);
  const auto session = Open(*engine);
  QueryRequest request = Request(Want::kIds, select::TopK{20}, 0, 1);
  const auto plain = Answer(*session, request);
  request.measure_mass = true;
  const auto measured = Answer(*session, request);
  const AttentionShape& shape = context_->spec().shape;
  ASSERT_EQ(measured.size(), static_cast<size_t>(shape.kv_heads));
  for (int64_t h = 0; h < shape.q_heads; ++h) {
    const auto head = static_cast<size_t>(h / shape.group());
    EXPECT_EQ(measured[head].ids, plain[head].ids);
    EXPECT_EQ(measured[head].scores, plain[head].scores);
    double sum = 0;
    for (const double score :
         context_->Scores(Layer(1), h, &queries_[h * shape.head_dim], session->zone())) {
      sum += std::exp(score);
    }
    EXPECT_NEAR(measured[head].zone_lse[static_cast<size_t>(h % shape.group())], std::log(sum),
                1e-4);
  }
}

TEST_F(ScannedHeadsTest, WhatIsKept_GoesWithTheContext) {
  const auto engine = MakeEngine(int64_t{1} << 40, 2);
  auto session = Open(*engine);
  (void)Answer(*session, Request(Want::kIds, select::TopK{20}, 0, 1));
  EXPECT_GT(engine->Statistics().index_bytes(), 0);
  session = nullptr;
  CARREL_ASSERT_OK(engine->Delete("report"));
  EXPECT_EQ(engine->Statistics().index_bytes(), 0);
}

}  // namespace
}  // namespace carrel::kvstore
