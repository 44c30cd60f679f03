// The store zone's state machine against a store of plain loops, which keeps a log of what it is asked.
#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <numeric>

#include "common/bf16.h"
#include "common/status.h"
#include "common/test_random.h"
#include "common/test_util.h"
#include "decoder/zone/candidate_rows.h"
#include "decoder/zone/make_zone.h"

namespace carrel::decoder {
namespace {

constexpr AttentionShape kShape{.layers = 3, .q_heads = 2, .kv_heads = 2, .head_dim = 8};
constexpr int64_t kTokens = 60, kTopK = 5;
constexpr RowRange kZone{3, 50};
const float kScale = 1.0f / std::sqrt(8.0f);

using retrieval::Part;
using retrieval::Piece;
using retrieval::RequestId;
using Ids = std::vector<Position>;

// Answers by brute force. Each q head has a KV head of its own, so that the best rows are those with
// the largest scores.
class FakeStore final : public retrieval::Session {
 public:
  explicit FakeStore(std::mt19937_64& rng) {
    for (std::vector<float>* rows : {&k_, &v_}) {
      *rows = RandomNormal(rng, kShape.layers * kShape.kv_heads * kTokens * kShape.head_dim);
      for (float& x : *rows) x = Bf16ToFloat(FloatToBf16(x));
    }
  }

  std::vector<std::string> log;
  std::function<void(Part&)> spoil = [](Part&) {};
  absl::Status fails = absl::OkStatus();

  absl::StatusOr<retrieval::Opened> Open(const retrieval::OpenRequest&) override {
    return retrieval::Opened();
  }
  absl::StatusOr<RequestId> Send(retrieval::Query query) override {
    constexpr const char* kWants[] = {"IDS", "ROWS", "VALUES", "ATTEND"};
    const RequestId id = ++last_id_;
    std::string what =
        absl::StrCat(kWants[static_cast<size_t>(query.want)], " of layer ", query.layer.value());
    if (select::IsAll(query.selection)) absl::StrAppend(&what, " all");
    if (select::TopKRows(query.selection) > 0)
      absl::StrAppend(&what, " top ", select::TopKRows(query.selection));
    if (query.speculative) absl::StrAppend(&what, " ahead");
    if (query.among_candidates_of != 0)
      absl::StrAppend(&what, " among ", query.among_candidates_of);
    log.push_back(absl::StrCat(id, ": ", what));
    asked_[id] = std::move(query);
    if (asked_[id].speculative) Answer(id, asked_[id]);  // keeps the candidates
    return id;
  }
  absl::StatusOr<RequestId> Send(retrieval::Fetch) override {
    return absl::UnimplementedError("no rows are fetched here");
  }
  absl::StatusOr<Part> Next(RequestId id) override {
    RETURN_IF_ERROR(fails);
    Part part = Answer(id, asked_.at(id));
    spoil(part);
    return part;
  }
  void Forget(RequestId id) override { log.push_back(absl::StrCat("forget ", id)); }
  bool broken() const override { return false; }
  int64_t bytes_sent() const override { return 0; }
  int64_t bytes_received() const override { return 0; }

  const float* Key(int64_t layer, int64_t head, Position row) const {
    return At(k_, layer, head, row);
  }
  double Score(int64_t layer, int64_t head, const float* q, Position row) const {
    return std::inner_product(q, q + kShape.head_dim, Key(layer, head, row), 0.0) * kScale;
  }
  Ids Best(int64_t layer, int64_t head, const float* q, Ids among, int64_t count) const {
    std::sort(among.begin(), among.end(), [&](Position a, Position b) {
      return Score(layer, head, q, a) > Score(layer, head, q, b);
    });
    among.resize(std::min(among.size(), static_cast<size_t>(count)));
    return among;
  }
  // out, then lse.
  std::vector<float> Attend(int64_t layer, int64_t head, const float* q, const Ids& rows) const {
    double sum = 0;
    std::vector<double> out(static_cast<size_t>(kShape.head_dim));
    for (const Position row : rows) {
      const double weight = std::exp(Score(layer, head, q, row));
      sum += weight;
      for (size_t c = 0; c < out.size(); ++c) out[c] += weight * At(v_, layer, head, row)[c];
    }
    std::vector<float> result;
    for (const double x : out) result.push_back(static_cast<float>(x / sum));
    result.push_back(static_cast<float>(std::log(sum)));
    return result;
  }
  static Ids Zone() {
    Ids ids(static_cast<size_t>(kZone.rows()));
    std::iota(ids.begin(), ids.end(), kZone.begin);
    return ids;
  }

 private:
  static const float* At(const std::vector<float>& rows, int64_t layer, int64_t head,
                         Position row) {
    return &rows[static_cast<size_t>(((layer * kShape.kv_heads + head) * kTokens + row) *
                                     kShape.head_dim)];
  }
  // What a part's pieces point at, which ends with it.
  struct Memory {
    std::deque<std::vector<uint16_t>> rows;
    std::deque<std::vector<float>> floats;
  };
  static void SetRows(const std::vector<float>& from, int64_t layer, int64_t head, const Ids& ids,
                      Memory& memory, std::vector<const void*>& to) {
    std::vector<uint16_t>& rows = memory.rows.emplace_back(ids.size() * kShape.head_dim);
    for (size_t j = 0; j < ids.size(); ++j) {
      uint16_t* const row = &rows[j * kShape.head_dim];
      for (int64_t c = 0; c < kShape.head_dim; ++c)
        row[c] = FloatToBf16(At(from, layer, head, ids[j])[c]);
      to.push_back(row);
    }
  }
  Part Answer(RequestId id, const retrieval::Query& query) {
    const int64_t layer = query.layer.value();
    const auto memory = std::make_shared<Memory>();
    Part part;
    part.last = true;
    part.rows = memory;
    for (int64_t i = 0; i < query.tokens; ++i) {
      for (int64_t head = 0; head < kShape.kv_heads; ++head) {
        const float* of_head =
            &query.queries[static_cast<size_t>((i * kShape.q_heads + head) * kShape.head_dim)];
        const std::pair<int64_t, int64_t> at{i, head};
        const Ids ids =
            select::IsAll(query.selection)
                ? Zone()
                : Best(layer, head, of_head,
                       query.among_candidates_of == 0 ? Zone()
                                                      : kept_.at(query.among_candidates_of).at(at),
                       select::TopKRows(query.selection));
        if (query.speculative) kept_[id][at] = ids;
        if (query.keeps_candidates()) continue;
        Piece& piece = part.pieces.emplace_back();
        piece.token = i;
        piece.kv_head = KvHead(static_cast<int32_t>(head));
        Fill(query, layer, head, of_head, ids, *memory, piece);
      }
    }
    return part;
  }
  void Fill(const retrieval::Query& query, int64_t layer, int64_t head, const float* q,
            const Ids& ids, Memory& memory, Piece& piece) const {
    if (query.measure_mass)
      piece.zone_lse = memory.floats.emplace_back(1, Attend(layer, head, q, Zone()).back());
    if (query.want == Want::kAttend) {
      const std::vector<float>& state = memory.floats.emplace_back(Attend(layer, head, q, ids));
      piece.out = {state.data(), static_cast<size_t>(kShape.head_dim)};
      piece.lse = {&state.back(), 1};
      return;
    }
    piece.rows = static_cast<int64_t>(ids.size());
    piece.ids = ids;
    if (query.want != Want::kRows) {
      for (const Position row : ids)
        piece.scores.push_back(static_cast<float>(Score(layer, head, q, row)));
    }
    if (query.want == Want::kRows) SetRows(k_, layer, head, ids, memory, piece.k);
    if (query.want != Want::kIds) SetRows(v_, layer, head, ids, memory, piece.v);
  }

  std::vector<float> k_, v_;
  std::map<RequestId, retrieval::Query> asked_;
  std::map<RequestId, std::map<std::pair<int64_t, int64_t>, Ids>> kept_;
  RequestId last_id_ = 0;
};

class StoreZoneTest : public testing::Test {
 protected:
  StoreZoneTest() {
    config_.selection = select::TopK{kTopK};
    config_.dense_layers = 1;
    config_.estimate = Estimate::kOff;
  }
  void Make() {
    auto zone = MakeStoreZone(
        OpenedContext{.config = config_,
                      .selections = LayerSelections(config_, kShape.layers, kZone.rows()),
                      .shape = kShape,
                      .tokens = kTokens,
                      .zone = kZone,
                      .max_top_k = 1000,
                      .max_fetch_rows = 1000,
                      .client = &store_,
                      .pool = &pool_});
    CARREL_ASSERT_OK(zone);
    zone_ = *std::move(zone);
  }
  std::vector<float> Queries(int64_t n) {
    return RandomNormal(rng_, n * kShape.q_heads * kShape.head_dim);
  }
  // A layer's turn; ahead: what Prefetch gets first, or empty.
  absl::Status Pass(Layer layer, const std::vector<float>& q,
                    const std::vector<float>& ahead = {}) {
    const int64_t n = static_cast<int64_t>(q.size()) / kShape.q_heads / kShape.head_dim;
    if (!ahead.empty()) RETURN_IF_ERROR(zone_->Prefetch(layer, ahead.data(), n));
    RETURN_IF_ERROR(zone_->Start(layer, q.data(), n));
    RETURN_IF_ERROR(zone_->Finish(layer, q.data(), n, partial_));
    Partial window;
    window.Reset(n, kShape);
    return zone_->Measure(layer, q.data(), n, partial_, window);
  }
  // That the layer attended to the best of `among`, or of all.
  void ExpectAttended(Layer layer, const std::vector<float>& q, int64_t count,
                      const std::function<Ids(int64_t head, const float* q)>& among = {}) {
    const int64_t d = kShape.head_dim;
    for (size_t at = 0; at < partial_.lse.size(); ++at) {
      const int64_t head = static_cast<int64_t>(at) % kShape.q_heads;
      const float* of_head = &q[at * static_cast<size_t>(d)];
      const Ids from = among ? among(static_cast<int64_t>(at), of_head) : FakeStore::Zone();
      const std::vector<float> expected = store_.Attend(
          layer.value(), head, of_head, store_.Best(layer.value(), head, of_head, from, count));
      EXPECT_NEAR(partial_.lse[at], expected.back(), 1e-4);
      for (int64_t c = 0; c < d; ++c)
        EXPECT_NEAR(partial_.out[at * static_cast<size_t>(d) + static_cast<size_t>(c)], expected[c],
                    1e-4);
    }
  }
  // What the candidates for `ahead` are.
  std::function<Ids(int64_t, const float*)> Candidates(Layer layer, const std::vector<float>& ahead,
                                                       int64_t count) {
    return [this, layer, &ahead, count](int64_t at, const float*) {
      return store_.Best(layer.value(), at % kShape.q_heads,
                         &ahead[static_cast<size_t>(at * kShape.head_dim)], FakeStore::Zone(),
                         count);
    };
  }

  std::mt19937_64 rng_{TestSeed()};
  FakeStore store_{rng_};
  ThreadPool pool_{2};
  RetrievalConfig config_;
  const LayerStatistics& StatisticsOf(int32_t layer) const {
    return zone_->statistics()[static_cast<size_t>(layer)];
  }
  std::unique_ptr<ZoneAttention> zone_;
  Partial partial_;
};

TEST_F(StoreZoneTest, EveryWant_AttendsToTheBestRows) {
  for (const Want want : {Want::kRows, Want::kValues, Want::kAttend}) {
    config_.want = want;
    Make();
    const std::vector<float> q = Queries(3);
    CARREL_ASSERT_OK(Pass(Layer(1), q));
    ExpectAttended(Layer(1), q, kTopK);
    EXPECT_EQ(StatisticsOf(1).tokens, 3);
    EXPECT_EQ(select::TopKRows(StatisticsOf(1).selection), kTopK);
    EXPECT_TRUE(select::IsAll(StatisticsOf(0).selection));
  }
  EXPECT_EQ(store_.log,
            (std::vector<std::string>{"1: ROWS of layer 1 top 5", "2: VALUES of layer 1 top 5",
                                      "3: ATTEND of layer 1 top 5"}));
}

TEST_F(StoreZoneTest, DenseLayer_AttendsToEveryRowAndAsksNothingAhead) {
  config_.prefetch = Prefetch::kSpeculative;
  Make();
  const std::vector<float> q = Queries(2);
  CARREL_ASSERT_OK(Pass(Layer(0), q, Queries(2)));
  ExpectAttended(Layer(0), q, kTokens);
  EXPECT_EQ(store_.log, (std::vector<std::string>{"1: ATTEND of layer 0 all"}));
}

TEST_F(StoreZoneTest, Speculative_TheTrueQueryChoosesAmongWhatWasAskedAhead) {
  config_.prefetch = Prefetch::kSpeculative;
  config_.oversample = 3;
  for (const Want want : {Want::kValues, Want::kAttend}) {
    config_.want = want;
    store_.log.clear();
    Make();
    const std::vector<float> q = Queries(2), ahead = Queries(2);
    CARREL_ASSERT_OK(Pass(Layer(2), q, ahead));
    ExpectAttended(Layer(2), q, kTopK, Candidates(Layer(2), ahead, 3 * kTopK));
    ASSERT_EQ(store_.log.size(), 3u);
    EXPECT_THAT(store_.log[0], testing::HasSubstr("IDS of layer 2 top 15 ahead"));
    EXPECT_THAT(store_.log[1], testing::HasSubstr("top 5 among"));
    EXPECT_THAT(store_.log[2], testing::HasSubstr("forget"));
    EXPECT_EQ(StatisticsOf(2).prefetched, 2);
  }
}

TEST_F(StoreZoneTest, SpeculativeRows_ComeAheadAndNothingIsAskedAgain) {
  config_.prefetch = Prefetch::kSpeculative;
  config_.want = Want::kRows;
  Make();
  const std::vector<float> q = Queries(2), ahead = Queries(2);
  CARREL_ASSERT_OK(Pass(Layer(1), q, ahead));
  ExpectAttended(Layer(1), q, kTopK, Candidates(Layer(1), ahead, 2 * kTopK));
  EXPECT_EQ(store_.log, (std::vector<std::string>{"1: ROWS of layer 1 top 10 ahead", "forget 1"}));
}

TEST_F(StoreZoneTest, Verified_TrustsNothingUntilThePromptHasShownIt) {
  config_.prefetch = Prefetch::kVerified;
  config_.verified_hit_rate = 1;
  Make();
  zone_->set_reading_prompt(true);
  const std::vector<float> q = Queries(4);
  CARREL_ASSERT_OK(Pass(Layer(1), q, Queries(4)));  // far off: not used, and remembered
  ExpectAttended(Layer(1), q, kTopK);
  EXPECT_EQ(StatisticsOf(1).verified_again, 4);
  CARREL_ASSERT_OK(
      Pass(Layer(1), q, q));  // the same queries: all hits, but the prompt is read still
  ExpectAttended(Layer(1), q, kTopK);
  EXPECT_EQ(StatisticsOf(1).prefetched, 0);
  zone_->set_reading_prompt(false);
  // One of the prompt's again: as near as what was trusted, to the bit.
  const std::vector<float> next(q.begin(), q.begin() + kShape.q_heads * kShape.head_dim);
  CARREL_ASSERT_OK(Pass(Layer(1), next, next));
  EXPECT_EQ(StatisticsOf(1).prefetched, 1);
  ExpectAttended(Layer(1), next, kTopK);
  CARREL_ASSERT_OK(Pass(Layer(1), next, Queries(1)));
  EXPECT_EQ(StatisticsOf(1).prefetched, 1);
  ExpectAttended(Layer(1), next, kTopK);
}

TEST_F(StoreZoneTest, Measured_HitRateMassAndErrorAreThoseOfTheDefinition) {
  config_.prefetch = Prefetch::kSpeculative;
  config_.measure = true;
  Make();
  const std::vector<float> q = Queries(1), ahead = Queries(1);
  CARREL_ASSERT_OK(Pass(Layer(1), q, ahead));
  double hits = 0, mass = 0;
  for (int64_t head = 0; head < kShape.kv_heads; ++head) {
    const float* of_head = &q[static_cast<size_t>(head * kShape.head_dim)];
    const Ids asked = Candidates(Layer(1), ahead, 2 * kTopK)(head, of_head);
    hits += ShareFound(store_.Best(1, head, of_head, FakeStore::Zone(), kTopK), asked) / 2;
    const Ids chosen = store_.Best(1, head, of_head, asked, kTopK);
    mass += std::exp(store_.Attend(1, head, of_head, chosen).back() -
                     store_.Attend(1, head, of_head, FakeStore::Zone()).back()) /
            2;
  }
  EXPECT_NEAR(StatisticsOf(1).hit_rate.value(), hits, 1e-6);
  EXPECT_NEAR(StatisticsOf(1).mass.value(), mass, 1e-4);
  EXPECT_NEAR(StatisticsOf(1).attended_mass.value(), mass, 1e-4);  // the window holds nothing
  EXPECT_EQ(StatisticsOf(1).output_error.count, 1);
  EXPECT_GT(StatisticsOf(1).output_error.value(), 0);
  // What only measured is in no layer's account.
  EXPECT_EQ(StatisticsOf(1).prefetched, 1);
}

TEST_F(StoreZoneTest, NotMeasuring_AsksNothingMore) {
  Make();
  const std::vector<float> q = Queries(1);
  CARREL_ASSERT_OK(Pass(Layer(1), q));
  EXPECT_EQ(store_.log.size(), 1u);
}

TEST_F(StoreZoneTest, Cancel_ForgetsWhatIsInFlightAndTheNextSequenceIsRight) {
  config_.prefetch = Prefetch::kSpeculative;
  Make();
  const std::vector<float> q = Queries(1);
  CARREL_ASSERT_OK(zone_->Prefetch(Layer(1), q.data(), 1));
  CARREL_ASSERT_OK(zone_->Start(Layer(1), q.data(), 1));
  zone_->Cancel();
  EXPECT_THAT(store_.log, testing::IsSupersetOf({"forget 1", "forget 2"}));
  const std::vector<float> other = Queries(1);
  CARREL_ASSERT_OK(Pass(Layer(1), other));
  ExpectAttended(Layer(1), other, kTopK);
}

TEST_F(StoreZoneTest, WrongReplies_AreDataLoss) {
  using Spoil = std::function<void(Part&)>;
  const std::vector<Spoil> spoils = {
      [](Part& part) { part.pieces.pop_back(); },
      [](Part& part) { part.pieces.push_back(part.pieces[0]); },
      [](Part& part) { part.pieces[0].kv_head = KvHead(2); },
      [](Part& part) { part.pieces[0].token = 7; },
      [](Part& part) { part.pieces[1].out = {}; },
      [](Part& part) { part.pieces[1].lse = part.pieces[1].out; },
  };
  for (size_t i = 0; i < spoils.size(); ++i) {
    SCOPED_TRACE(i);
    store_.spoil = spoils[i];
    Make();
    EXPECT_EQ(Pass(Layer(1), Queries(2)).code(), absl::StatusCode::kDataLoss);
  }
}

TEST_F(StoreZoneTest, AStoreThatFails_IsWhatIsSaid) {
  Make();
  store_.fails = absl::UnavailableError("the store is gone");
  EXPECT_THAT(Pass(Layer(1), Queries(1)), StatusIs(absl::StatusCode::kUnavailable, "is gone"));
}

}  // namespace
}  // namespace carrel::decoder
