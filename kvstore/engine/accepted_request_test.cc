// Requests that a session accepted and whoever holds their task answers, or drops.
#include <thread>

#include "carrel/v1/context.pb.h"
#include "common/test_util.h"
#include "kvstore/engine/session.h"
#include "kvstore/engine/test_context.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

class AcceptedRequestTest : public testing::Test {
 protected:
  void SetUp() override {
    RandomContextSpec spec;
    spec.seed = TestSeed();
    context_ = std::make_unique<RandomContext>(spec);
    engine_ = *Engine::Create({.search_threads = 2}, MakeStore(FreshTempDir(), {context_.get()}));
    const auto session = engine_->OpenSession(context_->Opening());
    CARREL_ASSERT_OK(session);
    session_ = *session;
  }
  QueryRequest Request(Want want) const {
    QueryRequest request;
    request.layer = Layer(1);
    request.tokens = 3;
    request.queries = context_->Queries(3, context_->spec().seed + 1);
    request.selection = select::TopK{30};
    request.want = want;
    return request;
  }

  std::unique_ptr<RandomContext> context_;
  std::unique_ptr<Engine> engine_;
  std::shared_ptr<Session> session_;
};

TEST_F(AcceptedRequestTest, Called_IsAnsweredThereAsIfSubmitted) {
  const QueryRequest request = Request(Want::kValues);
  const auto submitted = AskAndCollect(*session_, 1, request);
  CARREL_ASSERT_OK(submitted);
  ThreadPool pool(1);
  std::unique_ptr<Reply> reply;
  std::thread::id answered;
  const auto task = session_->Accept(2, request, [&](auto answer) {
    CARREL_ASSERT_OK(answer);
    reply = *std::move(answer);
    answered = std::this_thread::get_id();
  });
  CARREL_ASSERT_OK(task);
  EXPECT_EQ(reply, nullptr);
  EXPECT_THAT(session_->Accept(2, request, [](auto) {}),
              StatusIs(StatusCode::kInvalidArgument, "in flight already"));
  (*task)(pool);
  EXPECT_EQ(answered, std::this_thread::get_id());
  const auto accepted = Collect(*reply, 3, context_->spec().shape.kv_heads);
  CARREL_ASSERT_OK(accepted);
  EXPECT_EQ(accepted->heads, submitted->heads);
}

TEST_F(AcceptedRequestTest, Dropped_GivesItsPlaceBackAndFailsWhoWaitsForItsCandidates) {
  ThreadPool pool(0);
  QueryRequest ahead = Request(Want::kIds);
  ahead.speculative = true;
  auto candidates = session_->Accept(1, ahead, [](auto) { FAIL() << "answered"; });
  CARREL_ASSERT_OK(candidates);
  QueryRequest request = Request(Want::kValues);
  request.among_candidates_of = 1;
  absl::Status status;
  const auto among = session_->Accept(2, request, [&](auto answer) { status = answer.status(); });
  CARREL_ASSERT_OK(among);
  (*among)(pool);  // waits for the candidates
  CARREL_EXPECT_OK(status);
  candidates = absl::UnknownError("dropped");
  EXPECT_THAT(status, StatusIs(StatusCode::kCancelled, "among_candidates_of=1 failed"));
  CARREL_EXPECT_OK(session_->Accept(1, ahead, [](auto) {}));  // the id is free
}

TEST_F(AcceptedRequestTest, AttendedAtOnce_WritesWhatAReplyHas_AndRefusesAllElse) {
  ThreadPool pool(1);
  QueryRequest request = Request(Want::kAttend);
  const AttentionShape& shape = session_->context()->shape();
  const auto heads = static_cast<size_t>(request.tokens * shape.q_heads);
  std::vector<float> out(heads * shape.head_dim), lse(heads);
  EXPECT_THAT(session_->Attend(1, request, pool),
              StatusIs(StatusCode::kInvalidArgument, "memory of the caller"));
  request.out = out.data();
  request.lse = lse.data();
  CARREL_ASSERT_OK(session_->Attend(1, request, pool));
  const auto collected = AskAndCollect(*session_, 1, Request(Want::kAttend));  // the id is free
  CARREL_ASSERT_OK(collected);
  std::vector<float> out_of_reply, lse_of_reply;
  for (const CollectedHead& head : collected->heads) {
    out_of_reply.insert(out_of_reply.end(), head.out.begin(), head.out.end());
    lse_of_reply.insert(lse_of_reply.end(), head.lse.begin(), head.lse.end());
  }
  EXPECT_EQ(out, out_of_reply);
  EXPECT_EQ(lse, lse_of_reply);
  request.want = Want::kIds;
  EXPECT_EQ(session_->Attend(1, request, pool).status().code(), StatusCode::kInvalidArgument);
  request.want = Want::kAttend;
  request.among_candidates_of = 7;
  EXPECT_EQ(session_->Attend(1, request, pool).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(AcceptedRequestTest, PastItsDeadline_IsNotComputed) {
  ThreadPool pool(0);
  const auto past = std::chrono::steady_clock::now() - std::chrono::milliseconds(1);
  QueryRequest query = Request(Want::kAttend);
  query.deadline = past;
  FetchRequest fetch;
  fetch.layer = Layer(0);
  fetch.range = {0, 5};
  fetch.deadline = past;
  absl::Status asked, fetched, among;
  const auto first = session_->Accept(1, query, [&](auto answer) { asked = answer.status(); });
  CARREL_ASSERT_OK(first);
  (*first)(pool);
  EXPECT_THAT(asked, StatusIs(StatusCode::kDeadlineExceeded, "query"));
  const auto second = session_->Accept(2, fetch, [&](auto answer) { fetched = answer.status(); });
  CARREL_ASSERT_OK(second);
  (*second)(pool);
  EXPECT_THAT(fetched, StatusIs(StatusCode::kDeadlineExceeded, "fetch rows"));
  // Nor does what needs it wait for ever.
  QueryRequest ahead = Request(Want::kIds);
  ahead.speculative = true;
  ahead.deadline = past;
  const auto candidates = session_->Accept(3, ahead, [](auto) {});
  CARREL_ASSERT_OK(candidates);
  QueryRequest request = Request(Want::kValues);
  request.among_candidates_of = 3;
  const auto late = session_->Accept(4, request, [&](auto answer) { among = answer.status(); });
  CARREL_ASSERT_OK(late);
  (*late)(pool);
  (*candidates)(pool);
  EXPECT_THAT(among, StatusIs(StatusCode::kDeadlineExceeded, "among_candidates_of=3 failed"));
  EXPECT_EQ(engine_->Statistics().latencies_size(), 0);
  CARREL_EXPECT_OK(AskAndCollect(*session_, 1, Request(Want::kAttend)));  // the ids are free
}

}  // namespace
}  // namespace carrel::kvstore
