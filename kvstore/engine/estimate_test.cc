// The estimation term of partial attention, through a session on the real store.
#include <cmath>

#include "common/test_util.h"
#include "kvstore/engine/session.h"
#include "kvstore/engine/test_context.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

class EstimateTest : public testing::Test {
 protected:
  void Open(int64_t summary_rows, IndexKind kind = IndexKind::kFlat) {
    RandomContextSpec spec;
    spec.seed = seed_;
    spec.index.kind = kind;
    spec.summary_rows = summary_rows;
    context_ = std::make_unique<RandomContext>(spec);
    session_.reset();
    engine_.reset();  // and its store's lock
    dir_ = FreshTempDir();
    engine_ = *Engine::Create({}, MakeStore(dir_, {context_.get()}));
    session_ = *engine_->OpenSession(context_->Opening());
    // Flat attention: every row counts about alike.
    queries_ = context_->Queries(kTokens, seed_ + 1, 0.3f);
  }

  QueryRequest Request(const select::Selection& selection, bool estimate) const {
    QueryRequest request;
    request.layer = Layer(1);
    request.tokens = kTokens;
    request.queries = queries_;
    request.selection = selection;
    request.want = Want::kAttend;
    request.estimate = estimate;
    return request;
  }
  Collected Answer(const QueryRequest& request) {
    absl::StatusOr<Collected> answer = AskAndCollect(*session_, ++last_id_, request);
    EXPECT_TRUE(answer.ok()) << answer.status();
    return *std::move(answer);
  }
  // Mean over tokens and heads, against attention to the whole zone.
  double ErrorOf(const Collected& answer) {
    const Collected whole = Answer(Request(select::All(), false));
    double sum = 0;
    for (size_t i = 0; i < whole.heads.size(); ++i) {
      sum += RelativeError(answer.heads[i].out, whole.heads[i].out);
    }
    return sum / static_cast<double>(whole.heads.size());
  }
  double LseErrorOf(const Collected& answer) {
    const Collected whole = Answer(Request(select::All(), false));
    double worst = 0;
    for (size_t i = 0; i < whole.heads.size(); ++i) {
      for (size_t h = 0; h < whole.heads[i].lse.size(); ++h) {
        worst = std::max(worst, std::abs(double{whole.heads[i].lse[h]} - answer.heads[i].lse[h]));
      }
    }
    return worst;
  }

  static constexpr int64_t kTokens = 3;
  const uint64_t seed_ = TestSeed();
  std::string dir_;
  std::unique_ptr<RandomContext> context_;
  std::unique_ptr<Engine> engine_;
  std::shared_ptr<Session> session_;
  std::vector<float> queries_;
  uint64_t last_id_ = 0;
};

TEST_F(EstimateTest, EveryRowSelected_SameAnswer) {
  Open(16);
  const int64_t rows = session_->zone().rows();
  for (const select::Selection& selection :
       {select::Selection(select::TopK{rows}), select::Selection(select::All())}) {
    EXPECT_EQ(Answer(Request(selection, true)).heads, Answer(Request(selection, false)).heads);
  }
  const QueryRequest mass = Request(select::Mass{1}, true);
  EXPECT_LT(ErrorOf(Answer(mass)), 1e-5);
  const QueryRequest range = Request(select::Range{1000}, true);
  EXPECT_LT(ErrorOf(Answer(range)), 1e-5);
}

TEST_F(EstimateTest, FewRowsOfFlatAttention_ComesMuchNearer) {
  for (const IndexKind kind : {IndexKind::kFlat, IndexKind::kHnsw}) {
    Open(16, kind);
    const double without = ErrorOf(Answer(Request(select::TopK{64}, false)));
    const double with = ErrorOf(Answer(Request(select::TopK{64}, true)));
    EXPECT_LT(with, without / 3);
    EXPECT_LT(LseErrorOf(Answer(Request(select::TopK{64}, true))), 0.1);
    const QueryRequest range = Request(select::Range{0.2f}, true);
    EXPECT_LT(LseErrorOf(Answer(range)), 0.1);
    const QueryRequest mass = Request(select::Mass{0.1f}, true);
    EXPECT_LT(LseErrorOf(Answer(mass)), 0.1);
  }
}

TEST_F(EstimateTest, AmongCandidates_TheOthersCountToo) {
  Open(16);
  QueryRequest ahead = Request(select::TopK{40}, false);
  ahead.want = Want::kIds;
  ahead.speculative = true;
  Answer(ahead);
  QueryRequest request = Request(select::TopK{10}, true);
  request.among_candidates_of = last_id_;
  EXPECT_LT(LseErrorOf(Answer(request)), 0.1);
}

TEST_F(EstimateTest, AnotherWant_IsInvalidArgument) {
  Open(16);
  for (const Want want : {Want::kIds, Want::kRows, Want::kValues}) {
    QueryRequest request = Request(select::TopK{5}, true);
    request.want = want;
    EXPECT_THAT(AskAndCollect(*session_, ++last_id_, request),
                StatusIs(StatusCode::kInvalidArgument, "estimate is part of partial attention"));
  }
}

TEST_F(EstimateTest, ContextWithoutSummaries_IsFailedPreconditionAndSaysWhatToDo) {
  Open(0);
  EXPECT_THAT(AskAndCollect(*session_, ++last_id_, Request(select::TopK{5}, true)),
              StatusIs(StatusCode::kFailedPrecondition,
                       "context report has no summaries; make one that has them with carrel"));
  CARREL_EXPECT_OK(AskAndCollect(*session_, ++last_id_, Request(select::All(), true)));
}

TEST_F(EstimateTest, FlippedBitOfSummaries_IsDataLossThatNamesThem) {
  Open(16);
  session_.reset();
  engine_.reset();
  ASSERT_TRUE(FlipBitOf(dir_, context_->summaries(Layer(1), KvHead(1)).substr(4096)));
  engine_ = *Engine::Create({}, *Store::Open(dir_ + "/store", StoreMode::kReadOnly));
  session_ = *engine_->OpenSession(context_->Opening());
  EXPECT_THAT(AskAndCollect(*session_, ++last_id_, Request(select::TopK{5}, true)),
              StatusIs(StatusCode::kDataLoss, "summaries, layer 1, kv_head 1"));
  CARREL_EXPECT_OK(AskAndCollect(*session_, ++last_id_, Request(select::TopK{5}, false)));
  QueryRequest other = Request(select::TopK{5}, true);
  other.layer = Layer(0);
  CARREL_EXPECT_OK(AskAndCollect(*session_, ++last_id_, other));
}

}  // namespace
}  // namespace carrel::kvstore
