// Many sessions at once: each gets what a single one gets, or is told that there is no room.
#include <atomic>
#include <thread>

#include "carrel/v1/context.pb.h"
#include "common/test_util.h"
#include "kvstore/engine/test_context.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

constexpr int kSessions = 64;
constexpr int64_t kQueries = 12;

class LoadTest : public testing::TestWithParam<IndexKind> {
 protected:
  void Open(int64_t queue_limit) {
    RandomContextSpec spec;
    spec.tokens = 5000;
    spec.segment_tokens = 1024;
    spec.index.kind = GetParam();
    context_ = std::make_unique<RandomContext>(spec);
    EngineConfig config;
    config.search_threads = 4;
    config.queue_limit = queue_limit;
    engine_ = *Engine::Create(config, MakeStore(FreshTempDir(), {context_.get()}));
    for (int64_t i = 0; i < kQueries; ++i) {
      QueryRequest request;
      request.layer = Layer(static_cast<int32_t>(i % spec.shape.layers));
      request.tokens = 1 + i % 3;
      request.queries = context_->Queries(request.tokens, static_cast<uint64_t>(100 + i));
      request.selection = select::TopK{16 << i % 3};
      request.want = static_cast<Want>(i % 4);
      if (i % 5 == 4) {
        request.selection = select::Mass{0.3f};
      }
      requests_.push_back(std::move(request));
    }
    const auto alone = *engine_->OpenSession(context_->Opening());
    for (const QueryRequest& request : requests_) {
      const auto answer = AskAndCollect(*alone, ++ids_, request);
      CARREL_EXPECT_OK(answer);
      truth_.push_back(answer->heads);
    }
  }

  // Each session on a thread of its own asks everything; how many were refused.
  int64_t AskFromAll() {
    std::atomic<int64_t> refused{0};
    std::vector<std::thread> threads;
    for (int s = 0; s < kSessions; ++s) {
      threads.emplace_back([&, s] {
        const auto session = engine_->OpenSession(context_->Opening());
        CARREL_EXPECT_OK(session);
        for (int64_t i = 0; i < kQueries; ++i) {
          const auto at = static_cast<size_t>((i + s) % kQueries);
          const auto answer = AskAndCollect(**session, static_cast<uint64_t>(i + 1), requests_[at]);
          if (absl::IsResourceExhausted(answer.status())) {
            ++refused;
            continue;
          }
          CARREL_EXPECT_OK(answer);
          EXPECT_TRUE(answer->heads == truth_[at]) << "session " << s << " query " << at;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return refused;
  }

  std::unique_ptr<RandomContext> context_;
  std::unique_ptr<Engine> engine_;
  std::vector<QueryRequest> requests_;
  std::vector<std::vector<CollectedHead>> truth_;
  uint64_t ids_ = 0;
};

TEST_P(LoadTest, SixtyFourSessions_EachGetsWhatASingleOneGets) {
  Open(1024);
  EXPECT_EQ(AskFromAll(), 0);
  const v1::StatisticsResponse statistics = engine_->Statistics();
  int64_t counted = 0;
  for (const auto& kind : statistics.latencies()) counted += kind.count();
  EXPECT_EQ(counted, (kSessions + 1) * kQueries);
  EXPECT_EQ(statistics.refused(), 0);
}

TEST_P(LoadTest, RoomForFewRequests_OthersAreRefusedAndNoAnswerIsWrong) {
  Open(2);
  const int64_t refused = AskFromAll();
  EXPECT_EQ(engine_->Statistics().refused(), refused);
  std::cout << refused << " of " << kSessions * kQueries << " refused\n";
}

INSTANTIATE_TEST_SUITE_P(Kinds, LoadTest,
                         testing::Values(IndexKind::kFlat, IndexKind::kCode, IndexKind::kHnsw,
                                         IndexKind::kIvf),
                         [](const auto& info) { return std::string(IndexKindName(info.param)); });

}  // namespace
}  // namespace carrel::kvstore
