// Open contexts, limits, errors and many sessions at once; on the real store.
#include "kvstore/engine/engine.h"

#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <limits>
#include <random>
#include <thread>

#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/test_util.h"
#include "kvstore/engine/test_context.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

QueryRequest MakeQuery(const RandomContext& context, uint64_t seed, int64_t tokens = 1) {
  QueryRequest request;
  request.layer = Layer(0);
  request.tokens = tokens;
  request.queries = context.Queries(tokens, seed);
  request.selection = select::TopK{20};
  request.want = Want::kRows;
  return request;
}

class EngineTest : public testing::Test {
 protected:
  void Make(const EngineConfig& config, const std::vector<RandomContextSpec>& specs) {
    dir_ = FreshTempDir();
    std::vector<const RandomContext*> pointers;
    for (const RandomContextSpec& spec : specs) {
      contexts_.push_back(std::make_unique<RandomContext>(spec));
      pointers.push_back(contexts_.back().get());
    }
    engine_ = *Engine::Create(config, MakeStore(dir_, pointers));
  }
  std::shared_ptr<Session> Open(size_t i = 0) {
    absl::StatusOr<std::shared_ptr<Session>> session =
        engine_->OpenSession(contexts_[i]->Opening());
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *session : nullptr;
  }

  std::string dir_;
  std::vector<std::unique_ptr<RandomContext>> contexts_;
  std::unique_ptr<Engine> engine_;
};

RandomContextSpec Spec(const std::string& name, IndexKind kind = IndexKind::kFlat) {
  RandomContextSpec spec;
  spec.name = name;
  spec.index.kind = kind;
  spec.seed = std::hash<std::string>()(name);
  return spec;
}

TEST(EngineConfig, OutOfRange_NamesFieldValueAndBounds) {
  EngineConfig config;
  CARREL_EXPECT_OK(ValidateEngineConfig(config));
  config.max_top_k = 0;
  EXPECT_THAT(ValidateEngineConfig(config),
              StatusIs(StatusCode::kInvalidArgument, "max_top_k=0 is outside 1 .. 1048576"));
  config = EngineConfig();
  config.search_threads = -1;
  EXPECT_THAT(ValidateEngineConfig(config),
              StatusIs(StatusCode::kInvalidArgument, "search_threads=-1"));
  config = EngineConfig();
  config.memory_budget_bytes = 1;
  const std::string dir = FreshTempDir();
  EXPECT_THAT(Engine::Create(config, MakeStore(dir, {})),
              StatusIs(StatusCode::kInvalidArgument, "memory_budget_bytes=1"));
}

TEST_F(EngineTest, WhatAnInterruptedImportLeft_GoesWithItsAge) {
  EngineConfig config;
  config.import_age_s = 3600;
  const std::string dir = FreshTempDir();
  const auto leave = [&](const std::string& id, std::chrono::minutes ago) {
    const std::filesystem::path folder = dir + "/store/importing/" + id;
    std::filesystem::create_directories(folder);
    std::filesystem::last_write_time(folder, std::filesystem::file_time_type::clock::now() - ago);
    return folder;
  };
  const auto old = leave("0a", std::chrono::minutes(61));
  const auto recent = leave("0b", std::chrono::minutes(58));
  const auto engine = Engine::Create(config, MakeStore(dir, {}));
  CARREL_ASSERT_OK(engine);
  while (std::filesystem::exists(old)) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(std::filesystem::exists(recent));
}

TEST_F(EngineTest, Open_UnknownContextOrOtherModel_IsRefusedByName) {
  Make({}, {Spec("report")});
  OpenRequest request = contexts_[0]->Opening();
  request.context = "nothing";
  EXPECT_THAT(engine_->OpenSession(request), StatusIs(StatusCode::kNotFound, "nothing"));
  request = contexts_[0]->Opening();
  request.fingerprint[1].second = "0ther";
  EXPECT_THAT(engine_->OpenSession(request),
              StatusIs(StatusCode::kFailedPrecondition,
                       "open context report: fingerprint mismatch: weights_sha256: context has "
                       "5eed, model has 0ther"));
  EXPECT_EQ(engine_->sessions(), 0);
}

TEST_F(EngineTest, Open_PinnedContent_IsRefusedIfItIsAnother) {
  Make({}, {Spec("report"), Spec("other")});
  const std::string content_id = engine_->Get("report")->content_id();
  ASSERT_EQ(content_id.size(), 64u);
  OpenRequest request = contexts_[0]->Opening();
  for (const size_t digits : {12, 40, 64}) {
    request.content_id = content_id.substr(0, digits);
    CARREL_EXPECT_OK(engine_->OpenSession(request));
  }
  request.content_id = engine_->Get("other")->content_id();
  EXPECT_THAT(engine_->OpenSession(request),
              StatusIs(StatusCode::kFailedPrecondition,
                       absl::StrCat("open context report: context report has content id ",
                                    content_id, ", wanted is ", request.content_id)));
  for (const std::string& none :
       {content_id.substr(0, 11), content_id + "0", std::string(64, 'G')}) {
    request.content_id = none;
    EXPECT_THAT(engine_->OpenSession(request),
                StatusIs(StatusCode::kInvalidArgument, "is not 12 to 64 digits of 0-9 a-f"));
  }
  EXPECT_EQ(engine_->sessions(), 0);
}

TEST_F(EngineTest, Open_SinkAndLocal_CutTheZone) {
  Make({}, {Spec("report")});
  const struct {
    int64_t sink, local;
    RowRange zone;
  } cases[] = {
      {0, 0, {0, 700}},
      {4, 60, {4, 640}},
      {700, 0, {700, 700}},
      {0, 700, {0, 0}},
      {400, 400, {400, 400}},
      {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max(), {700, 700}}};
  for (const auto& c : cases) {
    const auto session = engine_->OpenSession(contexts_[0]->Opening(c.sink, c.local));
    CARREL_ASSERT_OK(session);
    EXPECT_EQ((*session)->zone(), c.zone) << c.sink << " " << c.local;
  }
  EXPECT_THAT(engine_->OpenSession(contexts_[0]->Opening(-1, 0)),
              StatusIs(StatusCode::kInvalidArgument, "open: sink=-1 is negative (context=report)"));
  EXPECT_THAT(
      engine_->OpenSession(contexts_[0]->Opening(0, -2)),
      StatusIs(StatusCode::kInvalidArgument, "open: local=-2 is negative (context=report)"));
}

TEST_F(EngineTest, Open_QueryDrift_IsGivenIfAskedForAndThere) {
  RandomContextSpec with = Spec("with");
  with.query_drift = true;
  Make({}, {with, Spec("without")});
  EXPECT_EQ(Open(0)->query_drift(), nullptr);
  OpenRequest request = contexts_[0]->Opening();
  request.query_drift = true;
  for (int session = 0; session < 2; ++session) {
    const auto opened = engine_->OpenSession(request);
    CARREL_ASSERT_OK(opened);
    ASSERT_NE((*opened)->query_drift(), nullptr);
    EXPECT_EQ(*(*opened)->query_drift(), contexts_[0]->query_drift());
  }
  request.context = "without";
  const auto opened = engine_->OpenSession(request);
  CARREL_ASSERT_OK(opened);
  EXPECT_TRUE((*opened)->query_drift()->empty());
}

TEST_F(EngineTest, Open_QueryDriftThatIsDamaged_IsDataLossForWhoAsks) {
  RandomContextSpec spec = Spec("report");
  spec.query_drift = true;
  const auto refused = [&](const char* why) {
    OpenRequest request = contexts_.back()->Opening();
    request.query_drift = true;
    EXPECT_THAT(engine_->OpenSession(request), StatusIs(StatusCode::kDataLoss, why));
    EXPECT_EQ(engine_->sessions(), 0);
    EXPECT_NE(Open(contexts_.size() - 1), nullptr);  // nothing else needs it
  };
  Make({}, {spec});
  engine_.reset();
  const std::vector<float>& drift = contexts_[0]->query_drift()[1];
  ASSERT_TRUE(
      FlipBitOf(dir_ + "/store", std::string(reinterpret_cast<const char*>(drift.data() + 3), 64)));
  engine_ = *Engine::Create({}, *Store::Open(dir_ + "/store", StoreMode::kReadOnly));
  refused("query drift, layer 1, segment 0");

  const auto with = [&](const std::string& name, const std::vector<float>& other) {
    spec.name = name;
    contexts_.push_back(std::make_unique<RandomContext>(spec));
    contexts_.back()->query_drift()[1] = other;
    engine_.reset();  // its store's folder is the next one's
    engine_ = *Engine::Create({}, MakeStore(FreshTempDir(), {contexts_.back().get()}));
  };
  const std::vector<float> whole = drift;
  with("lost", {});
  refused("query drift (context=lost layer=1): missing, the manifest says 512 bytes");
  with("short", {whole.begin() + 1, whole.end()});
  refused("query drift (context=short layer=1): 508 bytes of dtype 0, must be 128 floats");
  std::vector<float> endless = whole;
  endless.back() = INFINITY;
  with("endless", endless);
  refused("query drift (context=endless layer=1): not finite");
}

TEST_F(EngineTest, Open_MoreContextsThanTheLimit_IdleOnesMakeRoom) {
  EngineConfig config;
  config.max_open_contexts = 2;
  Make(config, {Spec("a"), Spec("b"), Spec("c")});
  auto a = Open(0);
  Open(1);           // closed at once: idle
  auto c = Open(2);  // in place of b
  EXPECT_THAT(engine_->OpenSession(contexts_[1]->Opening()),
              StatusIs(StatusCode::kResourceExhausted,
                       "open context b: 2 contexts are in use (max_open_contexts=2)"));
  a.reset();
  auto b = Open(1);
  CARREL_EXPECT_OK(AskAndCollect(*b, 1, MakeQuery(*contexts_[1], 7)));
  CARREL_EXPECT_OK(AskAndCollect(*c, 1, MakeQuery(*contexts_[2], 7)));
}

TEST_F(EngineTest, Open_TooManySessions_IsResourceExhausted) {
  EngineConfig config;
  config.max_sessions = 1;
  Make(config, {Spec("report")});
  auto session = Open();
  EXPECT_THAT(engine_->OpenSession(contexts_[0]->Opening()),
              StatusIs(StatusCode::kResourceExhausted, "max_sessions=1"));
  session.reset();
  EXPECT_NE(Open(), nullptr);
}

TEST_F(EngineTest, Delete_WhileOpen_IsRefusedAndAllowedAfterwards) {
  Make({}, {Spec("report", IndexKind::kHnsw)});
  auto session = Open();
  EXPECT_THAT(engine_->Delete("report"),
              StatusIs(StatusCode::kFailedPrecondition, "1 sessions have it open"));
  CARREL_EXPECT_OK(AskAndCollect(*session, 1, MakeQuery(*contexts_[0], 7)));
  session.reset();
  CARREL_EXPECT_OK(engine_->Delete("report"));
  EXPECT_EQ(engine_->index_counters().resident_bytes, 0);
  EXPECT_THAT(engine_->OpenSession(contexts_[0]->Opening()),
              StatusIs(StatusCode::kNotFound, "report"));
  EXPECT_THAT(engine_->Delete("report"), StatusIs(StatusCode::kNotFound, "report"));
}

TEST_F(EngineTest, Delete_OnAReadOnlyStore_SaysSo) {
  Make({}, {Spec("report")});
  engine_.reset();
  engine_ = *Engine::Create({}, *Store::Open(dir_ + "/store", StoreMode::kReadOnly));
  const absl::Status status = engine_->Delete("report");
  EXPECT_THAT(status, StatusIs(StatusCode::kFailedPrecondition, "delete context report"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("read-only"));
  EXPECT_NE(Open(), nullptr);
}

TEST_F(EngineTest, ReadOnly_SeesWhatAnotherPublishesReplacesAndDeletes) {
  const std::string dir = FreshTempDir();
  const RandomContext first(Spec("first")), second(Spec("second"));
  RandomContextSpec other = Spec("first");
  other.tokens = 300;
  other.seed += 1;
  const RandomContext replaced(other);
  const std::unique_ptr<Store> writer = MakeStore(dir, {&first});
  const auto open = [&] {
    return *Engine::Create({}, *Store::Open(dir + "/store", StoreMode::kReadOnly));
  };
  // Several at a time, and beside the one that writes.
  const std::unique_ptr<Engine> engines[] = {open(), open()};
  for (const auto& engine : engines) {
    EXPECT_EQ(engine->List(nullptr)->size(), 1u);
    CARREL_EXPECT_OK(engine->OpenSession(first.Opening()).status());
    EXPECT_THAT(engine->OpenSession(second.Opening()), StatusIs(StatusCode::kNotFound, "second"));
  }
  CARREL_ASSERT_OK(second.Publish(*writer, dir));
  const auto kept = *engines[0]->OpenSession(first.Opening());
  CARREL_ASSERT_OK(writer->Delete("first"));
  for (const auto& engine : engines) {
    const auto session = engine->OpenSession(second.Opening());
    CARREL_ASSERT_OK(session.status());
    CARREL_EXPECT_OK(AskAndCollect(**session, 1, MakeQuery(second, 7)));
    EXPECT_THAT(engine->OpenSession(first.Opening()), StatusIs(StatusCode::kNotFound, "first"));
  }
  CARREL_ASSERT_OK(replaced.Publish(*writer, dir));
  for (const auto& engine : engines) {
    const auto session = engine->OpenSession(replaced.Opening());
    CARREL_ASSERT_OK(session.status());
    EXPECT_EQ((*session)->context()->tokens(), 300);
  }
  // Who had the deleted one open reads it to the end.
  EXPECT_EQ(kept->context()->tokens(), first.spec().tokens);
  CARREL_EXPECT_OK(AskAndCollect(*kept, 1, MakeQuery(first, 7)));
}

TEST_F(EngineTest, OpenFromManyThreadsWhileItIsDeleted_EachGetsItOrIsTold) {
  Make({}, {Spec("a"), Spec("b")});
  std::atomic<int> opened{0}, not_found{0}, deleted{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        const auto session = engine_->OpenSession(contexts_[(t + i) % 2]->Opening());
        if (session.ok()) {
          ++opened;
        } else {
          EXPECT_THAT(session, StatusIs(StatusCode::kNotFound, "is not in store"));
          ++not_found;
        }
        if (t == 0 && i == 10 && engine_->Delete("a").ok()) ++deleted;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(opened + not_found, 160);
  EXPECT_GT(opened, 0);
  EXPECT_EQ(engine_->Statistics().sessions(), 0);
  if (deleted == 0) {
    CARREL_EXPECT_OK(engine_->Delete("a"));
  }
  EXPECT_THAT(engine_->OpenSession(contexts_[0]->Opening()), StatusIs(StatusCode::kNotFound, "a"));
  EXPECT_NE(Open(1), nullptr);
}

TEST_F(EngineTest, LongName_IsCutInMessages) {
  Make({}, {Spec("report")});
  OpenRequest request = contexts_[0]->Opening();
  request.context = std::string(5000, 'n');
  const absl::Status status = engine_->OpenSession(request).status();
  EXPECT_THAT(status, StatusIs(StatusCode::kNotFound,
                               std::string(128, 'n') + "... (5000 bytes) is not in store"));
  EXPECT_LT(status.message().size(), 1000u);
  request = contexts_[0]->Opening();
  for (int i = 0; i < 200; ++i) {
    request.fingerprint.emplace_back(absl::StrCat("field", i), std::string(5000, 'v'));
  }
  const absl::Status mismatch = engine_->OpenSession(request).status();
  EXPECT_EQ(mismatch.code(), StatusCode::kFailedPrecondition);
  EXPECT_LT(mismatch.message().size(), 6000u);  // what gRPC sends as a status
}

TEST_F(EngineTest, RequestsBeyondTheBudgetOfBytes_AreRefusedAndLaterOnesServed) {
  EngineConfig config;
  config.search_threads = 1;
  config.request_budget_bytes = int64_t{16} << 20;
  Make(config, {Spec("report")});
  const auto session = Open();
  QueryRequest large = MakeQuery(*contexts_[0], 3, 64);
  large.want = Want::kIds;
  large.selection = select::TopK{600};
  const auto done = [](absl::StatusOr<std::unique_ptr<Reply>>) {};
  int64_t accepted = 0;
  absl::Status refused;
  {
    Blockade blockade(*engine_, 1);
    for (uint64_t id = 1; id <= 60 && refused.ok(); ++id) {
      refused = session->Submit(id, large, done);
      if (refused.ok()) ++accepted;
    }
    EXPECT_THAT(refused, StatusIs(StatusCode::kResourceExhausted, "request_budget_bytes=16777216"));
    EXPECT_GT(accepted, 0);
    EXPECT_LE(engine_->request_budget().used_bytes(), int64_t{16} << 20);
    // Another session is not kept from a small request.
    const auto other = Open();
    CARREL_EXPECT_OK(other->Submit(1, MakeQuery(*contexts_[0], 3), done));
  }
  while (engine_->request_budget().used_bytes() > 0) std::this_thread::yield();
  EXPECT_EQ(engine_->request_budget().refused(), 1);
  CARREL_EXPECT_OK(AskAndCollect(*session, 99, large));
}

TEST_F(EngineTest, CandidatesThatAreRemembered_CountUntilTheSessionEnds) {
  Make({}, {Spec("report")});
  auto session = Open();
  QueryRequest ahead = MakeQuery(*contexts_[0], 3);
  ahead.speculative = true;
  ahead.want = Want::kIds;
  CARREL_ASSERT_OK(AskAndCollect(*session, 1, ahead));
  EXPECT_GT(engine_->request_budget().used_bytes(), 0);
  session.reset();
  while (engine_->request_budget().used_bytes() > 0) std::this_thread::yield();
}

TEST_F(EngineTest, Queue_Full_IsResourceExhaustedAndTheSessionSurvives) {
  EngineConfig config;
  config.search_threads = 2;
  config.queue_limit = 3;
  Make(config, {Spec("report")});
  auto session = Open();
  std::atomic<int> answered{0};
  std::promise<void> all;
  const auto done = [&](absl::StatusOr<std::unique_ptr<Reply>> reply) {
    CARREL_EXPECT_OK(reply);
    if (++answered == 3) all.set_value();
  };
  {
    Blockade blockade(*engine_, 2);
    for (uint64_t id = 1; id <= 3; ++id) {
      CARREL_ASSERT_OK(session->Submit(id, MakeQuery(*contexts_[0], id), done));
    }
    EXPECT_THAT(session->Submit(4, MakeQuery(*contexts_[0], 4), done),
                StatusIs(StatusCode::kResourceExhausted, "queue_limit=3"));
    EXPECT_EQ(answered, 0);
  }
  all.get_future().wait();
  CARREL_EXPECT_OK(AskAndCollect(*session, 4, MakeQuery(*contexts_[0], 4)));
}

TEST_F(EngineTest, Session_TooManyInFlightOrTheSameId_IsRefused) {
  EngineConfig config;
  config.search_threads = 1;
  config.max_in_flight = 2;
  Make(config, {Spec("report")});
  auto session = Open();
  auto held = Ask(*session, 1, MakeQuery(*contexts_[0], 1));
  CARREL_ASSERT_OK(held);
  EXPECT_THAT(Ask(*session, 1, MakeQuery(*contexts_[0], 2)),
              StatusIs(StatusCode::kInvalidArgument, "request_id=1 is in flight already"));
  EXPECT_THAT(Ask(*session, 0, MakeQuery(*contexts_[0], 2)),
              StatusIs(StatusCode::kInvalidArgument, "request_id is 0"));
  auto other = Ask(*session, 2, MakeQuery(*contexts_[0], 2));
  CARREL_ASSERT_OK(other);
  EXPECT_THAT(Ask(*session, 3, MakeQuery(*contexts_[0], 3)),
              StatusIs(StatusCode::kResourceExhausted, "max_in_flight=2"));
  held->reset();
  CARREL_EXPECT_OK(Ask(*session, 1, MakeQuery(*contexts_[0], 1)));
}

TEST_F(EngineTest, Session_ResultsBeyondTheirMemory_AreRefused) {
  EngineConfig config;
  config.max_result_bytes = 1 << 20;
  config.max_query_tokens = 4096;
  Make(config, {Spec("report")});
  auto session = Open();
  QueryRequest request = MakeQuery(*contexts_[0], 1, 500);
  request.want = Want::kIds;
  request.selection = select::TopK{600};
  EXPECT_THAT(Ask(*session, 1, request),
              StatusIs(StatusCode::kResourceExhausted, "max_result_bytes=1048576"));
  // Under `all` nothing lies in memory, so that the same rows can be had.
  request.selection = select::All();
  CARREL_EXPECT_OK(AskAndCollect(*session, 2, request));
}

TEST_F(EngineTest, Session_Cancelled_DropsWhatWaits) {
  EngineConfig config;
  config.search_threads = 1;
  Make(config, {Spec("report")});
  auto session = Open();
  std::vector<std::promise<absl::Status>> answers(3);
  {
    Blockade blockade(*engine_, 1);
    QueryRequest ahead = MakeQuery(*contexts_[0], 1);
    ahead.speculative = true;
    ahead.want = Want::kIds;
    const auto done = [&](size_t i) {
      return [&answers, i](absl::StatusOr<std::unique_ptr<Reply>> reply) {
        answers[i].set_value(reply.status());
      };
    };
    CARREL_ASSERT_OK(session->Submit(1, ahead, done(0)));
    QueryRequest among = MakeQuery(*contexts_[0], 1);
    among.among_candidates_of = 1;
    CARREL_ASSERT_OK(session->Submit(2, among, done(1)));
    CARREL_ASSERT_OK(
        session->Submit(3, FetchRequest{{.layer = Layer(0), .range = {0, 5}}}, done(2)));
    session->Cancel();
  }
  for (auto& answer : answers) {
    EXPECT_THAT(answer.get_future().get(), StatusIs(StatusCode::kCancelled, "cancelled"));
  }
}

TEST_F(EngineTest, Candidates_UnknownForgottenOrOfAnotherLayer_AreRefused) {
  EngineConfig config;
  config.max_candidate_sets = 2;
  Make(config, {Spec("report")});
  auto session = Open();
  QueryRequest ahead = MakeQuery(*contexts_[0], 1);
  ahead.speculative = true;
  ahead.want = Want::kIds;
  for (uint64_t id = 1; id <= 3; ++id) CARREL_ASSERT_OK(Ask(*session, id, ahead));
  QueryRequest among = MakeQuery(*contexts_[0], 2);
  for (uint64_t unknown : {1, 77}) {
    among.among_candidates_of = unknown;
    EXPECT_THAT(Ask(*session, 9, among),
                StatusIs(StatusCode::kInvalidArgument,
                         absl::StrCat("among_candidates_of=", unknown,
                                      " is not among the latest 2 speculative queries")));
  }
  among.among_candidates_of = 3;
  among.layer = Layer(1);
  EXPECT_THAT(Ask(*session, 9, among),
              StatusIs(StatusCode::kInvalidArgument, "among_candidates_of=3 asked layer=0"));
  among.layer = Layer(0);
  CARREL_EXPECT_OK(Ask(*session, 9, among));
}

TEST_F(EngineTest, Candidates_NamedBeforeTheyAreFound_AreWaitedFor) {
  EngineConfig config;
  config.search_threads = 4;
  Make(config, {Spec("report")});
  auto session = Open();
  std::promise<absl::StatusOr<std::unique_ptr<Reply>>> answer;
  {
    Blockade blockade(*engine_, 4);
    QueryRequest ahead = MakeQuery(*contexts_[0], 1);
    ahead.speculative = true;
    ahead.want = Want::kIds;
    CARREL_ASSERT_OK(session->Submit(1, ahead, [](auto) {}));
    QueryRequest among = MakeQuery(*contexts_[0], 1);
    among.among_candidates_of = 1;
    CARREL_ASSERT_OK(
        session->Submit(2, among, [&](auto reply) { answer.set_value(std::move(reply)); }));
  }
  const auto reply = answer.get_future().get();
  CARREL_ASSERT_OK(reply);
  const auto heads = Collect(**reply, 1, 2);
  CARREL_ASSERT_OK(heads);
  EXPECT_EQ(heads->heads[0].ids.size(), 20u);
}

TEST_F(EngineTest, FlippedBitInRows_IsDataLossNamingThePlace) {
  Make({}, {Spec("report")});
  const int64_t row_values = contexts_[0]->spec().shape.head_dim;
  for (bool values : {false, true}) {
    const uint16_t* rows = values ? contexts_[0]->values(Layer(1), KvHead(1))
                                  : contexts_[0]->keys(Layer(1), KvHead(1));
    ASSERT_TRUE(FlipBitOf(dir_ + "/store",
                          std::string(reinterpret_cast<const char*>(rows + 200 * row_values), 64)));
  }
  auto session = Open();
  uint64_t id = 0;
  for (Want want : {Want::kIds, Want::kRows, Want::kValues, Want::kAttend}) {
    QueryRequest request = MakeQuery(*contexts_[0], 3);
    request.layer = Layer(1);
    request.selection = select::All();
    request.want = want;
    const auto answer = AskAndCollect(*session, ++id, request);
    EXPECT_THAT(answer, StatusIs(StatusCode::kDataLoss, "report"));
    for (const char* part : {"layer 1", "kv_head 1", "segment 1"}) {
      EXPECT_THAT(std::string(answer.status().message()), HasSubstr(part));
    }
  }
  FetchRequest fetch{{.layer = Layer(1), .range = {190, 210}}};
  const auto reply = Ask(*session, ++id, fetch);
  CARREL_ASSERT_OK(reply);
  EXPECT_THAT(Collect(**reply, 1, 2), StatusIs(StatusCode::kDataLoss, "segment 1"));
  // The other layer is as good as ever.
  CARREL_EXPECT_OK(AskAndCollect(*session, ++id, MakeQuery(*contexts_[0], 3)));
}

TEST_F(EngineTest, FlippedBitInAnIndex_IsDataLossBeforeItIsParsed) {
  Make({}, {Spec("report", IndexKind::kHnsw)});
  const std::string& blob = contexts_[0]->index_blob(Layer(0), KvHead(1));
  ASSERT_TRUE(FlipBitOf(dir_ + "/store", blob.substr(blob.size() / 2, 256)));
  auto session = Open();
  const auto answer = AskAndCollect(*session, 1, MakeQuery(*contexts_[0], 3));
  EXPECT_THAT(answer, StatusIs(StatusCode::kDataLoss, "loading the index"));
  for (const char* part : {"report", "layer 0", "kv_head 1", "segment 0"}) {
    EXPECT_THAT(std::string(answer.status().message()), HasSubstr(part));
  }
  EXPECT_EQ(engine_->index_counters().loads, 1);  // of the other head, once
}

// Sixteen sessions, each thread asking a mixture, get what each gets alone.
TEST_F(EngineTest, SixteenSessionsAndATinyBudget_GetWhatEachGetsAlone) {
  const uint64_t seed = TestSeed();
  RandomContextSpec spec = Spec("report", IndexKind::kHnsw);
  spec.seed = seed;
  spec.tokens = 6000;
  spec.segment_tokens = 2048;
  EngineConfig config;
  config.search_threads = 3;
  Make(config, {spec});
  const auto request_of = [&](int session, int i) {
    std::mt19937_64 rng(seed + session * 1000 + i);
    QueryRequest request = MakeQuery(*contexts_[0], rng(), 1 + rng() % 3);
    request.layer = Layer(static_cast<int32_t>(rng() % 2));
    request.want = static_cast<Want>(rng() % 4);
    const bool all = rng() % 8 == 0;
    request.selection = select::TopK{1 + static_cast<int64_t>(rng() % 64)};
    if (all) request.selection = select::All();
    request.measure_mass = rng() % 4 == 0;
    return request;
  };
  constexpr int kSessions = 16, kRequests = 12;
  std::vector<std::vector<CollectedHead>> alone;
  auto single = Open();
  for (int s = 0; s < kSessions; ++s) {
    for (int i = 0; i < kRequests; ++i) {
      auto answer = AskAndCollect(*single, 1, request_of(s, i));
      CARREL_ASSERT_OK(answer);
      alone.push_back(std::move(answer->heads));
    }
  }
  const int64_t all_indexes = engine_->index_counters().resident_bytes;
  EXPECT_EQ(engine_->index_counters().loads, 4);
  single.reset();
  engine_.reset();

  // Room for one index, or two.
  config.memory_budget_bytes = std::max<int64_t>(1 << 20, all_indexes * 2 / 5);
  ASSERT_LT(config.memory_budget_bytes, all_indexes);
  engine_ = *Engine::Create(config, *Store::Open(dir_ + "/store", StoreMode::kReadOnly));
  std::atomic<int> different{0};
  std::vector<std::thread> threads;
  for (int s = 0; s < kSessions; ++s) {
    threads.emplace_back([&, s] {
      auto session = Open();
      for (int i = 0; i < kRequests; ++i) {
        const auto answer = AskAndCollect(*session, 1 + i, request_of(s, i));
        EXPECT_TRUE(answer.ok()) << answer.status();
        if (!answer.ok() || answer->heads != alone[s * kRequests + i]) ++different;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(different, 0);
  EXPECT_GT(engine_->index_counters().evictions, 0);
  EXPECT_LE(engine_->index_counters().resident_bytes, config.memory_budget_bytes);
}

TEST_F(EngineTest, IndexLargerThanTheBudget_IsResourceExhaustedForItsQueriesOnly) {
  RandomContextSpec spec = Spec("report", IndexKind::kHnsw);
  spec.tokens = 12000;
  spec.segment_tokens = 4096;
  spec.shape = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 8};
  EngineConfig config;
  config.memory_budget_bytes = 1 << 20;
  Make(config, {spec});
  auto session = Open();
  const auto answer = AskAndCollect(*session, 1, MakeQuery(*contexts_[0], 1));
  EXPECT_THAT(answer,
              StatusIs(StatusCode::kResourceExhausted, "exceeds memory_budget_bytes=1048576"));
  QueryRequest all = MakeQuery(*contexts_[0], 1);
  all.selection = select::All();
  CARREL_EXPECT_OK(AskAndCollect(*session, 2, all));
}

TEST_F(EngineTest, ListAndGet_GiveWhatIsPublished) {
  Make({}, {Spec("a"), Spec("b")});
  std::vector<absl::Status> unreadable;
  auto manifests = engine_->List(&unreadable);
  CARREL_ASSERT_OK(manifests);
  ASSERT_EQ(manifests->size(), 2u);
  EXPECT_EQ((*manifests)[1].name(), "b");
  EXPECT_TRUE(unreadable.empty());
  const auto manifest = engine_->Get("a");
  CARREL_ASSERT_OK(manifest);
  EXPECT_EQ(manifest->tokens(), 700);
  EXPECT_THAT(engine_->Get("c"), StatusIs(StatusCode::kNotFound, "c"));
}

}  // namespace
}  // namespace carrel::kvstore
