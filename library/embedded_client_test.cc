// Whoever asks a store over gRPC, and whoever asks one in this process, is answered alike.
#include "library/embedded_client.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <optional>
#include <random>
#include <set>

#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/test_util.h"
#include "decoder/client/store_client_grpc.h"
#include "kvstore/engine/test_context.h"
#include "kvstore/service/server.h"
#include "kvstore/storage/store.h"

namespace carrel::library {
namespace {

using absl::StatusCode;
using kvstore::IndexKind;
using kvstore::RandomContext;
using retrieval::RequestId;
using retrieval::Want;

// kWaiting: a client that is waited with, as a decoder's is (a pool is given).
enum class Way : uint8_t { kGrpc = 0, kEmbedded = 1, kWaiting = 2 };
constexpr Way kWays[] = {Way::kGrpc, Way::kEmbedded, Way::kWaiting};

std::string NameOf(Way way) {
  constexpr const char* kNames[] = {"Grpc", "Embedded", "Waiting"};
  return kNames[static_cast<int>(way)];
}

// A store with one context, open in this process.
class World {
 public:
  World(const kvstore::RandomContextSpec& spec, const kvstore::EngineConfig& config)
      : context_(spec), dir_(FreshTempDir()) {
    kvstore::MakeStore(dir_, {&context_});
    engine_ = *kvstore::Engine::Create(
        config, *kvstore::Store::Open(dir_ + "/store", kvstore::StoreMode::kReadWrite));
    kvstore::ServerConfig server;
    server.listen.clear();
    server_ = *kvstore::Server::Start(server, engine_.get());
  }

  std::unique_ptr<retrieval::Session> Client(Way way) {
    if (way != Way::kGrpc) {
      return MakeEmbeddedClient(engine_.get(), way == Way::kWaiting ? &pool_ : nullptr);
    }
    return *decoder::OpenStoreChannel(server_->InProcessChannel(), absl::Seconds(60));
  }
  std::unique_ptr<retrieval::Session> Opened(Way way) {
    std::unique_ptr<retrieval::Session> client = Client(way);
    CARREL_EXPECT_OK(client->Open(Opening()));
    return client;
  }
  retrieval::OpenRequest Opening() const { return context_.Opening(); }

  retrieval::Query Query(uint64_t seed, int64_t tokens = 1) const {
    retrieval::Query query;
    query.layer = Layer(1);
    query.tokens = tokens;
    query.queries = context_.Queries(tokens, seed);
    query.selection = select::TopK{20};
    query.want = Want::kRows;
    return query;
  }
  // Asked ahead: the store keeps its candidates.
  retrieval::Query Ahead(uint64_t seed) const {
    retrieval::Query query = Query(seed);
    query.speculative = true;
    query.want = Want::kIds;
    return query;
  }
  retrieval::Query Among(uint64_t seed, RequestId candidates) const {
    retrieval::Query query = Query(seed);
    query.among_candidates_of = candidates;
    return query;
  }

  const RandomContext& context() const { return context_; }
  kvstore::Engine& engine() { return *engine_; }
  const std::string& dir() const { return dir_; }

 private:
  const RandomContext context_;
  const std::string dir_;
  std::unique_ptr<kvstore::Engine> engine_;
  std::unique_ptr<kvstore::Server> server_;
  ThreadPool pool_{1};
};

retrieval::Fetch Range(int32_t layer, int64_t begin, int64_t end) {
  return {.layer = Layer(layer), .range = {begin, end}};
}

using Parts = std::vector<retrieval::Part>;

absl::StatusOr<Parts> Take(retrieval::Session& client, RequestId id) {
  Parts parts;
  do {
    absl::StatusOr<retrieval::Part> part = client.Next(id);
    if (!part.ok()) return part.status();
    parts.push_back(*std::move(part));
  } while (!parts.back().last);
  return parts;
}

class EveryClient : public testing::TestWithParam<Way> {
 protected:
  void Make(const kvstore::EngineConfig& config = {}) {
    kvstore::RandomContextSpec spec;
    spec.seed = TestSeed();
    world_.emplace(spec, config);
  }
  std::unique_ptr<retrieval::Session> Opened() { return world_->Opened(GetParam()); }

  std::optional<World> world_;
};

INSTANTIATE_TEST_SUITE_P(Ways, EveryClient, testing::ValuesIn(kWays),
                         [](const auto& info) { return NameOf(info.param); });

TEST_P(EveryClient, RepliesInAnyOrderAndInParts_ReachTheirRequests) {
  Make({.search_threads = 2, .reply_part_bytes = 4096});
  const auto client = Opened();
  const auto rows = client->Send(Range(0, 0, 300));
  const auto first = client->Send(world_->Query(1, 4));
  retrieval::Query other = world_->Query(2);
  other.layer = Layer(0);
  const auto second = client->Send(other);
  CARREL_ASSERT_OK(rows);
  CARREL_ASSERT_OK(first);
  CARREL_ASSERT_OK(second);
  const auto of_second = Take(*client, *second), of_rows = Take(*client, *rows),
             of_first = Take(*client, *first);
  CARREL_ASSERT_OK(of_first);
  CARREL_ASSERT_OK(of_second);
  CARREL_ASSERT_OK(of_rows);
  EXPECT_GT(of_first->size(), 4u);
  EXPECT_GT(of_rows->size(), 10u);
  EXPECT_EQ(of_first->back().pieces.back().token, 3);
  EXPECT_EQ(of_second->back().pieces.back().token, 0);
  EXPECT_THAT(client->Next(*first), StatusIs(StatusCode::kFailedPrecondition, "read wholly"));
  EXPECT_THAT(client->Next(4711), StatusIs(StatusCode::kFailedPrecondition, "was not sent"));
  EXPECT_GT(client->bytes_sent(), 0);
  EXPECT_GT(client->bytes_received(), 2 * 300 * 2 * 32);
  EXPECT_FALSE(client->broken());
}

TEST_P(EveryClient, BadRequest_KeepsItsCodeSaysWhatWasAskedAndLeavesTheSession) {
  Make();
  const auto client = Opened();
  retrieval::Query bad = world_->Query(1);
  bad.selection = select::TopK{701};
  const auto asked = client->Send(bad);
  CARREL_ASSERT_OK(asked);
  EXPECT_THAT(client->Next(*asked),
              StatusIs(StatusCode::kInvalidArgument, "query layer 1: query: "));
  const auto fetched = client->Send(Range(0, 5, 701));
  CARREL_ASSERT_OK(fetched);
  EXPECT_THAT(client->Next(*fetched),
              StatusIs(StatusCode::kInvalidArgument, "fetch rows of layer 0: "));
  CARREL_EXPECT_OK(Take(*client, *client->Send(world_->Query(1))));
  EXPECT_FALSE(client->broken());
}

// Answered at once it has the numbers and errors of a request.
TEST_P(EveryClient, Attend_IsWhatSendAndNextBring) {
  kvstore::RandomContextSpec spec;
  spec.seed = TestSeed();
  spec.tokens = 2600;
  spec.index.kind = IndexKind::kFlat;
  spec.summary_rows = 20;
  world_.emplace(spec, kvstore::EngineConfig());
  const auto client = Opened();
  const AttentionShape& shape = spec.shape;
  const std::vector<float> q = world_->context().Queries(3, TestSeed());
  std::vector<float> out(q.size()), lse(static_cast<size_t>(3 * shape.q_heads));
  for (const select::Selection& selection :
       {select::Selection(select::TopK{20}), select::Selection(select::TopK{300, {300, 7}}),
        select::Selection(select::All())}) {
    retrieval::Query query;
    query.layer = Layer(1);
    query.tokens = 3;
    query.queries = q;
    query.selection = selection;
    query.want = Want::kAttend;
    query.estimate = !select::IsAll(selection);
    retrieval::AttendReply reply{.out = out.data(), .lse = lse.data()};
    const absl::Status attended = client->Attend(query, reply);
    EXPECT_EQ(client->attends(), GetParam() == Way::kWaiting);
    if (!client->attends()) {
      EXPECT_THAT(attended, StatusIs(StatusCode::kUnimplemented, ""));
      continue;
    }
    CARREL_ASSERT_OK(attended);
    const auto parts = Take(*client, *client->Send(query));
    CARREL_ASSERT_OK(parts);
    int64_t heads = 0, rows = 0;
    for (const retrieval::Part& part : *parts) {
      rows += part.statistics.rows;
      for (const retrieval::Piece& piece : part.pieces) {
        const auto at = static_cast<size_t>(piece.token * shape.q_heads +
                                            piece.kv_head.value() * shape.group());
        EXPECT_EQ(std::memcmp(piece.lse.data(), &lse[at], piece.lse.size() * 4), 0);
        EXPECT_EQ(std::memcmp(piece.out.data(), &out[at * shape.head_dim], piece.out.size() * 4),
                  0);
        ++heads;
      }
    }
    EXPECT_EQ(heads, 3 * shape.kv_heads);
    EXPECT_EQ(rows, reply.statistics.rows);
  }
  if (!client->attends()) return;
  retrieval::Query bad = world_->Query(1);
  bad.queries[5] = NAN;
  bad.want = Want::kAttend;
  retrieval::AttendReply reply{.out = out.data(), .lse = lse.data()};
  EXPECT_THAT(client->Attend(bad, reply),
              StatusIs(StatusCode::kInvalidArgument, "query layer 1: query: "));
  EXPECT_FALSE(client->broken());
  EXPECT_THAT(world_->Client(GetParam())->Attend(bad, reply),
              StatusIs(StatusCode::kFailedPrecondition, "query layer 1: the first request"));
}

// What looks at every row is no query of the protocol.
TEST_P(EveryClient, AScan_IsAnsweredInThisProcessAlone) {
  kvstore::RandomContextSpec spec;
  spec.seed = TestSeed();
  spec.index.kind = IndexKind::kHnsw;
  world_.emplace(spec, kvstore::EngineConfig());
  const auto client = Opened();
  retrieval::Query query = world_->Query(1);
  query.scan = true;
  const auto id = client->Send(query);
  if (GetParam() == Way::kGrpc) {
    EXPECT_THAT(id, StatusIs(StatusCode::kUnimplemented, "searches its index"));
    return;
  }
  CARREL_ASSERT_OK(id);
  const auto parts = Take(*client, *id);
  CARREL_ASSERT_OK(parts);
  const RandomContext& context = world_->context();
  for (const retrieval::Piece& piece : parts->front().pieces) {
    const int64_t q_head = piece.kv_head.value() * spec.shape.group();
    std::vector<Position> ranked =
        context.Ranked(Layer(1), piece.kv_head, &query.queries[q_head * spec.shape.head_dim],
                       {4, spec.tokens - 60});
    ranked.resize(20);
    EXPECT_EQ(piece.ids, ranked);
  }
}

TEST_P(EveryClient, RefusedOpen_KeepsItsCodeAndEndsTheSession) {
  Make();
  retrieval::OpenRequest absent = world_->Opening(), other = absent, negative = absent,
                         unnamed = absent;
  absent.context = "reports";
  other.fingerprint[0].second = "f64";
  negative.sink = -1;
  unnamed.context = "";
  const std::pair<retrieval::OpenRequest, absl::Status> cases[] = {
      {absent, absl::NotFoundError("open context reports: context reports is not in the store")},
      {other, absl::FailedPreconditionError("open context report")},
      {negative, absl::InvalidArgumentError("open context report")},
      {unnamed, absl::InvalidArgumentError("open: context is empty")},
  };
  for (const auto& [open, expected] : cases) {
    const auto client = world_->Client(GetParam());
    const auto opened = client->Open(open);
    EXPECT_THAT(opened, StatusIs(expected.code(), std::string(expected.message())));
    EXPECT_TRUE(client->broken());
    EXPECT_THAT(client->Send(world_->Query(1)), StatusIs(expected.code(), "query layer 1: "));
  }
  while (world_->engine().sessions() > 0) absl::SleepFor(absl::Milliseconds(1));
}

TEST_P(EveryClient, RequestBeforeOpen_EndsTheSession) {
  Make();
  const auto client = world_->Client(GetParam());
  const auto id = client->Send(world_->Query(1));
  CARREL_ASSERT_OK(id);
  EXPECT_THAT(client->Next(*id), StatusIs(StatusCode::kFailedPrecondition,
                                          "query layer 1: the first request of a session must be"));
  EXPECT_THAT(client->Open(world_->Opening()),
              StatusIs(StatusCode::kFailedPrecondition, "the first request of a session must be"));
}

TEST_P(EveryClient, SecondOpen_IsRefusedAndLeavesTheSession) {
  Make();
  const auto client = Opened();
  EXPECT_THAT(client->Open(world_->Opening()),
              StatusIs(StatusCode::kFailedPrecondition,
                       "open context report: open: the session is open already"));
  CARREL_EXPECT_OK(Take(*client, *client->Send(world_->Query(1))));
}

// One that travels is refused before it is read.
TEST_P(EveryClient, RequestLargerThanAnyOfItsContext_IsRefused) {
  Make();
  const auto client = Opened();
  const auto id = client->Send(world_->Query(1, 5000));
  CARREL_ASSERT_OK(id);
  const bool travels = GetParam() == Way::kGrpc;
  EXPECT_THAT(client->Next(*id),
              StatusIs(travels ? StatusCode::kResourceExhausted : StatusCode::kInvalidArgument,
                       travels ? "query layer 1: request" : "query layer 1: query: tokens=5000"));
  EXPECT_EQ(client->broken(), travels);
}

TEST_P(EveryClient, ForgottenRequest_ItsPartsAreDroppedAndItsPlaceIsFree) {
  Make({.search_threads = 2, .reply_part_bytes = 4096});
  const auto client = Opened();
  // More than may be in flight.
  for (int i = 0; i < 200; ++i) {
    const auto id = client->Send(world_->Query(1, 8));
    CARREL_ASSERT_OK(id);
    const auto part = client->Next(*id);
    CARREL_ASSERT_OK(part);
    EXPECT_FALSE(part->last);
    client->Forget(*id);
    client->Forget(*id);
    EXPECT_THAT(client->Next(*id), StatusIs(StatusCode::kFailedPrecondition, "forgotten"));
  }
  client->Forget(12345);  // of no request: nothing happens
}

TEST_P(EveryClient, DestroyedWithRequestsInFlight_EndsTheSession) {
  Make({.search_threads = 1});
  std::unique_ptr<retrieval::Session> client = Opened();
  {
    const kvstore::Blockade blockade(world_->engine(), 1);
    const auto candidates = client->Send(world_->Ahead(1));
    CARREL_ASSERT_OK(candidates);
    CARREL_ASSERT_OK(client->Send(world_->Among(1, *candidates)));
    CARREL_ASSERT_OK(client->Send(Range(0, 0, 700)));
    CARREL_ASSERT_OK(client->Send(world_->Query(2)));
    client.reset();
  }
  while (world_->engine().sessions() > 0) absl::SleepFor(absl::Milliseconds(1));
}

TEST_P(EveryClient, MoreInFlightThanAllowed_IsResourceExhausted) {
  Make({.search_threads = 1, .max_in_flight = 3});
  const auto client = Opened();
  std::vector<RequestId> ids;
  {
    const kvstore::Blockade blockade(world_->engine(), 1);
    for (int i = 0; i < 4; ++i) ids.push_back(*client->Send(world_->Query(1)));
    EXPECT_THAT(client->Next(ids[3]),
                StatusIs(StatusCode::kResourceExhausted, "(max_in_flight=3)"));
  }
  for (int i = 0; i < 3; ++i) CARREL_EXPECT_OK(Take(*client, ids[i]));
  CARREL_EXPECT_OK(Take(*client, *client->Send(world_->Query(1))));
}

TEST_P(EveryClient, CandidatesThatTheQueueRefused_AreNotWaitedFor) {
  Make({.search_threads = 1, .queue_limit = 1});
  const auto client = Opened();
  RequestId first, second;
  {
    const kvstore::Blockade blockade(world_->engine(), 1);
    first = *client->Send(world_->Ahead(1));
    second = *client->Send(world_->Ahead(1));
    EXPECT_THAT(client->Next(second), StatusIs(StatusCode::kResourceExhausted, "queue_limit=1"));
  }
  CARREL_EXPECT_OK(Take(*client, first));
  while (world_->engine().Statistics().waiting() > 0) absl::SleepFor(absl::Milliseconds(1));
  CARREL_EXPECT_OK(Take(*client, *client->Send(world_->Among(1, first))));
  EXPECT_THAT(client->Next(*client->Send(world_->Among(1, second))),
              StatusIs(StatusCode::kInvalidArgument, "is not among the latest"));
}

TEST_P(EveryClient, CandidatesAskedAheadAndForgotten_AreThereForTheTrueQuery) {
  Make();
  const auto client = Opened();
  for (int i = 0; i < 50; ++i) {
    const auto candidates = client->Send(world_->Ahead(100 + i));
    CARREL_ASSERT_OK(candidates);
    client->Forget(*candidates);
    const auto id = client->Send(world_->Among(100 + i, *candidates));
    CARREL_ASSERT_OK(id);
    const auto chosen = Take(*client, *id);
    CARREL_ASSERT_OK(chosen);
    const auto direct = Take(*client, *client->Send(world_->Query(100 + i)));
    CARREL_ASSERT_OK(direct);
    EXPECT_EQ(chosen->front().pieces[0].ids, direct->front().pieces[0].ids);
  }
}

TEST_P(EveryClient, DamagedContext_IsDataLossWhereItIsReadAndNowhereElse) {
  Make();
  const uint16_t* const keys = world_->context().keys(Layer(1), KvHead(1));
  ASSERT_TRUE(kvstore::FlipBitOf(
      world_->dir(), std::string(reinterpret_cast<const char*>(keys + 300 * 32), 20 * 64)));
  const auto client = Opened();
  for (const Want want : {Want::kIds, Want::kRows, Want::kValues, Want::kAttend}) {
    retrieval::Query query = world_->Query(1);
    query.want = want;
    EXPECT_THAT(client->Next(*client->Send(query)),
                StatusIs(StatusCode::kDataLoss, "query layer 1: "));
    query.layer = Layer(0);
    CARREL_EXPECT_OK(Take(*client, *client->Send(query)));
  }
  EXPECT_THAT(Take(*client, *client->Send(Range(1, 0, 700))),
              StatusIs(StatusCode::kDataLoss, "fetch rows of layer 1: "));
  EXPECT_FALSE(client->broken());
}

// --- the same requests to clients of every kind ---

// Random requests, many of them bad.
class Asker {
 public:
  Asker(const RandomContext& context, uint64_t seed)
      : context_(context), shape_(context.spec().shape), random_(seed) {}

  int64_t Pick(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  bool Chance(int percent) { return Pick(1, 100) <= percent; }

  retrieval::Query Query(const std::deque<RequestId>& candidates) {
    retrieval::Query query;
    query.layer = Layer(static_cast<int32_t>(Pick(0, shape_.layers - (Chance(95) ? 1 : 0))));
    query.tokens = Chance(10) ? 0 : Pick(1, 5);
    query.queries = context_.Queries(query.tokens, static_cast<uint64_t>(Pick(0, 1 << 30)), 3);
    if (!query.queries.empty() && Chance(2)) query.queries[0] = INFINITY;
    query.want = static_cast<Want>(Pick(0, 3));
    query.selection = Selection();
    query.speculative = Chance(25);
    if (Chance(25)) {
      query.among_candidates_of =
          candidates.empty() || Chance(10)
              ? 4711
              : candidates[static_cast<size_t>(Pick(0, int64_t(candidates.size()) - 1))];
    }
    query.measure_mass = Chance(20);
    query.estimate = query.want == Want::kAttend ? Chance(50) : Chance(2);
    query.effort = Chance(80) ? 0 : Pick(0, 200);
    if (Chance(15)) Hold(query);
    return query;
  }

  retrieval::Fetch Fetch() {
    retrieval::Fetch fetch;
    fetch.layer = Layer(static_cast<int32_t>(Pick(0, shape_.layers - (Chance(95) ? 1 : 0))));
    for (int64_t i = Pick(0, 2); i > 0; --i)
      fetch.kv_heads.push_back(KvHead(static_cast<int32_t>(Pick(0, shape_.kv_heads - 1))));
    const int64_t tokens = context_.spec().tokens;
    fetch.by_ids = Chance(50);
    if (fetch.by_ids) {
      std::set<int64_t> ids;
      for (int64_t i = Pick(0, 40); i > 0; --i) ids.insert(Pick(0, tokens - (Chance(99) ? 1 : 0)));
      fetch.ids.assign(ids.begin(), ids.end());
    } else {
      const int64_t begin = Pick(0, tokens);
      fetch.range = {begin, Pick(Chance(95) ? begin : 0, tokens + (Chance(5) ? 1 : 0))};
    }
    return fetch;
  }

 private:
  select::Selection Selection() {
    const int64_t tokens = context_.spec().tokens;
    const int64_t max_rows = Chance(10) ? Pick(0, tokens) : 0;
    switch (Pick(0, 8)) {
      case 0:
        return select::All();
      case 1:
        return select::Range{static_cast<float>(Pick(-1, 30)) * 0.3f, max_rows};
      case 2:
        return select::Mass{static_cast<float>(Pick(0, 21)) * 0.05f, max_rows};
      default:
        select::TopK top_k{Chance(90) ? Pick(1, 60) : Pick(0, tokens + 1)};
        for (int64_t head = 0; Chance(20) && head < shape_.kv_heads; ++head)
          top_k.of_head.push_back(Pick(1, std::max<int64_t>(1, top_k.rows)));
        return top_k;
    }
  }

  // Of one KV head.
  void Hold(retrieval::Query& query) {
    query.held.resize(static_cast<size_t>(shape_.kv_heads));
    std::vector<Position>& rows = query.held[static_cast<size_t>(Pick(0, shape_.kv_heads - 1))];
    Position last = 0;
    for (int64_t i = Pick(1, 60); i > 0; --i) {
      last += Pick(1, 14);
      if (last < context_.spec().tokens) rows.push_back(last);
    }
  }

  const RandomContext& context_;
  const AttentionShape shape_;
  std::mt19937_64 random_;
};

// What may differ: times, and where an operator finds an error in a server's log.
std::string Comparable(const absl::StatusOr<Parts>& taken, size_t row_bytes) {
  if (!taken.ok()) {
    const std::vector<std::string> message =
        absl::StrSplit(std::string(taken.status().message()), " [session ");
    return absl::StrCat(absl::StatusCodeToString(taken.status().code()), ": ", message[0]);
  }
  std::string all;
  const auto add = [&](const void* numbers, size_t bytes) {
    absl::StrAppend(&all, bytes, ":", absl::string_view(static_cast<const char*>(numbers), bytes),
                    " ");
  };
  for (const retrieval::Part& part : *taken) {
    const retrieval::QueryStatistics& counted = part.statistics;
    absl::StrAppend(&all, "part last=", part.last, " candidates=", counted.candidates,
                    " visited=", counted.visited, " rows=", counted.rows);
    for (const retrieval::Piece& piece : part.pieces) {
      absl::StrAppend(&all, " token=", piece.token, " head=", piece.kv_head.value(), " ");
      add(piece.ids.data(), piece.ids.size() * 8);
      add(piece.scores.data(), piece.scores.size() * 4);
      for (const auto& span : {piece.out, piece.lse, piece.zone_lse, piece.rest})
        add(span.data(), span.size() * 4);
      // One behind the other.
      for (const auto* rows : {&piece.k, &piece.v})
        add(rows->empty() ? nullptr : rows->front(), rows->size() * row_bytes);
    }
  }
  return all;
}

class Comparison {
 public:
  Comparison(World& world, uint64_t seed) : asker_(world.context(), seed) {
    for (const Way way : kWays) {
      clients_.push_back(world.Client(way));
      retrieval::OpenRequest open = world.Opening();
      open.query_drift = true;
      const auto opened = clients_.back()->Open(open);
      CARREL_EXPECT_OK(opened);
      if (way == Way::kGrpc) opened_ = *opened;
      EXPECT_EQ(opened->manifest, opened_.manifest) << NameOf(way);
      EXPECT_EQ(opened->query_drift, opened_.query_drift) << NameOf(way);
      EXPECT_EQ(opened->zone, opened_.zone) << NameOf(way);
    }
  }

  // Some requests, read in another order than they were sent; some are forgotten.
  void Round() {
    std::vector<RequestId> ids;
    for (int64_t i = asker_.Pick(1, 5); i > 0; --i) {
      const bool fetches = asker_.Chance(20);
      const retrieval::Fetch fetch = fetches ? asker_.Fetch() : retrieval::Fetch();
      const retrieval::Query query = fetches ? retrieval::Query() : asker_.Query(candidates_);
      for (const auto& client : clients_) {
        const auto id = fetches ? client->Send(fetch) : client->Send(query);
        CARREL_ASSERT_OK(id);
        if (client == clients_[0]) {
          ids.push_back(*id);
        } else {
          EXPECT_EQ(*id, ids.back());
        }
      }
      if (query.keeps_candidates()) candidates_.push_back(ids.back());
      if (candidates_.size() > 10) candidates_.pop_front();
    }
    for (size_t i = ids.size() - 1; i > 0; --i)
      std::swap(ids[i], ids[static_cast<size_t>(asker_.Pick(0, static_cast<int64_t>(i)))]);
    for (const RequestId id : ids) {
      const bool forget = asker_.Chance(10);
      std::string first;
      for (size_t c = 0; c < clients_.size(); ++c) {
        if (forget) {
          clients_[c]->Forget(id);
          continue;
        }
        const absl::StatusOr<Parts> taken = Take(*clients_[c], id);
        const std::string answer =
            Comparable(taken, static_cast<size_t>(opened_.context.shape.head_dim) * 2);
        if (c == 0) {
          (taken.ok() ? answered_ : refused_)++;
          first = answer;
        }
        EXPECT_EQ(answer, first) << NameOf(kWays[c]) << " request " << id;
      }
    }
  }

  void Finish() {
    for (size_t c = 0; c < clients_.size(); ++c) {
      EXPECT_FALSE(clients_[c]->broken());
    }
  }
  int64_t answered() const { return answered_; }
  int64_t refused() const { return refused_; }

 private:
  Asker asker_;
  std::vector<std::unique_ptr<retrieval::Session>> clients_;  // in the order of kWays
  retrieval::Opened opened_;
  std::deque<RequestId> candidates_;
  int64_t answered_ = 0, refused_ = 0;
};

kvstore::RandomContextSpec RandomSpec(IndexKind kind, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  kvstore::RandomContextSpec spec;
  spec.shape.kv_heads = static_cast<int32_t>(pick(1, 3));
  spec.shape.q_heads = spec.shape.kv_heads * static_cast<int32_t>(pick(1, 3));
  spec.shape.head_dim = pick(0, 1) == 0 ? 32 : 64;
  spec.tokens = pick(300, 900);
  spec.segment_tokens = pick(1, 4) * 64;
  spec.index.kind = kind;
  spec.summary_rows = pick(0, 1) * 40;
  spec.query_drift = pick(0, 1) == 0;
  spec.seed = seed;
  return spec;
}

class EveryKind : public testing::TestWithParam<IndexKind> {};

// graph wants sampled queries, which random contexts have none of.
INSTANTIATE_TEST_SUITE_P(Kinds, EveryKind,
                         testing::Values(IndexKind::kFlat, IndexKind::kInt8, IndexKind::kCode,
                                         IndexKind::kHnsw, IndexKind::kIvf),
                         [](const auto& info) {
                           return std::string(kvstore::IndexKindName(info.param));
                         });

TEST_P(EveryKind, RandomRequests_AreAnsweredBitByBitAlike) {
  const uint64_t seed = TestSeed();
  World world(RandomSpec(GetParam(), seed), {.search_threads = 2, .reply_part_bytes = 8192});
  Comparison comparison(world, seed);
  for (int round = 0; round < 60; ++round) comparison.Round();
  comparison.Finish();
  EXPECT_GT(comparison.answered(), 40);
  EXPECT_GT(comparison.refused(), 10);
}

TEST_P(EveryKind, DamagedContext_IsRefusedAlike) {
  const uint64_t seed = TestSeed();
  World world(RandomSpec(GetParam(), seed), {.search_threads = 2, .reply_part_bytes = 8192});
  for (const uint16_t* rows :
       {world.context().keys(Layer(1), KvHead(0)), world.context().values(Layer(0), KvHead(0))}) {
    ASSERT_TRUE(
        kvstore::FlipBitOf(world.dir(), std::string(reinterpret_cast<const char*>(rows), 1024)));
  }
  Comparison comparison(world, seed);
  for (int round = 0; round < 30; ++round) comparison.Round();
  comparison.Finish();
  EXPECT_GT(comparison.refused(), 10);
}

}  // namespace
}  // namespace carrel::library
