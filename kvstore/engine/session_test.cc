// What a query answers, against plain loops over the same rows; on the real store.
#include "kvstore/engine/session.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>

#include "common/test_util.h"
#include "kvstore/engine/attend_all.h"
#include "kvstore/engine/test_context.h"
#include "kvstore/engine/zone_rest.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

constexpr double kTolerance = 1e-5;

// The worst difference of scores or of their logarithmic sums: absolute where they are small, since
// products that cancel leave nothing to be relative to.
double LogitError(absl::Span<const float> out, absl::Span<const float> ref) {
  if (out.size() != ref.size()) return INFINITY;
  double worst = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] == ref[i]) continue;
    const double error =
        std::abs(double{out[i]} - ref[i]) / std::max(1.0, std::abs(double{ref[i]}));
    if (std::isnan(error)) return INFINITY;
    worst = std::max(worst, error);
  }
  return worst;
}
constexpr int64_t kQueryTokens = 3;

struct SessionCase {
  const char* name;
  IndexKind kind;
  int64_t sink, local;
};

class SessionTest : public testing::TestWithParam<SessionCase> {
 protected:
  void SetUp() override {
    RandomContextSpec spec;
    spec.seed = seed_;
    spec.index.kind = GetParam().kind;
    context_ = std::make_unique<RandomContext>(spec);
    dir_ = FreshTempDir();
    EngineConfig config;
    config.search_threads = 3;
    engine_ = *Engine::Create(config, MakeStore(dir_, {context_.get()}));
    absl::StatusOr<std::shared_ptr<Session>> session =
        engine_->OpenSession(context_->Opening(GetParam().sink, GetParam().local));
    CARREL_ASSERT_OK(session);
    session_ = *session;
    zone_ = session_->zone();
    queries_ = context_->Queries(kQueryTokens, seed_ + 1);
  }

  QueryRequest Request(const select::Selection& selection, Want want) const {
    QueryRequest request;
    request.layer = Layer(1);
    request.tokens = kQueryTokens;
    request.queries = queries_;
    request.selection = selection;
    request.want = want;
    return request;
  }
  Collected Answer(const QueryRequest& request) {
    absl::StatusOr<Collected> answer = AskAndCollect(*session_, ++last_id_, request);
    if (!answer.ok()) {
      ADD_FAILURE() << answer.status();
      Collected empty;
      empty.heads.resize(static_cast<size_t>(request.tokens * shape().kv_heads));
      return empty;
    }
    return *std::move(answer);
  }
  const AttentionShape& shape() const { return context_->spec().shape; }
  const float* QueryOf(int64_t token, int64_t q_head) const {
    return &queries_[(token * shape().q_heads + q_head) * shape().head_dim];
  }

  // What must be selected: by plain loops, or for a graph what it finds over the rows in memory.
  std::vector<Position> ExpectedIds(const QueryRequest& request, int64_t token, KvHead head) const {
    const int64_t first_q_head = head.value() * shape().group();
    std::vector<Position> ranked =
        context_->Ranked(request.layer, head, QueryOf(token, first_q_head), zone_);
    if (select::IsAll(request.selection)) {
      std::sort(ranked.begin(), ranked.end());
      return ranked;
    }
    const int64_t top_k = std::get<select::TopK>(request.selection).Of(head);
    if (GetParam().kind == IndexKind::kFlat || top_k >= zone_.rows()) {
      if (top_k < zone_.rows()) ranked.resize(static_cast<size_t>(top_k));
      return ranked;
    }
    const Rows rows = Rows::FromMemory(context_->keys(request.layer, head), context_->spec().tokens,
                                       shape().head_dim);
    const auto index =
        OpenIndex(context_->spec().index, context_->index_blob(request.layer, head), rows);
    EXPECT_TRUE(index.ok()) << index.status();
    SearchRequest search;
    search.queries = QueryOf(token, first_q_head);
    search.group = shape().group();
    search.scale = 1 / std::sqrt(static_cast<float>(shape().head_dim));
    search.zone = zone_;
    search.top_k = top_k;
    SearchScratch scratch;
    SearchResult result;
    CARREL_EXPECT_OK((*index)->Search(search, scratch, result));
    return result.ids;
  }

  // The ids are the expected ones, but for the order of rows that fp32 does not tell apart.
  void CheckIds(const QueryRequest& request, const std::vector<Position>& ids,
                const std::vector<Position>& expected, int64_t token, KvHead kv_head) const {
    if (ids == expected) return;
    ASSERT_EQ(ids.size(), expected.size());
    EXPECT_EQ(std::set<Position>(ids.begin(), ids.end()).size(), ids.size());
    const std::vector<double> scores = context_->GroupScores(
        request.layer, kv_head, QueryOf(token, kv_head.value() * shape().group()), zone_);
    for (size_t i = 0; i < ids.size(); ++i) {
      ASSERT_TRUE(ids[i] >= zone_.begin && ids[i] < zone_.end) << ids[i];
      EXPECT_NEAR(scores[ids[i] - zone_.begin], scores[expected[i] - zone_.begin], kTolerance)
          << "place " << i;
    }
  }

  void CheckHead(const QueryRequest& request, const CollectedHead& head, int64_t token,
                 KvHead kv_head) const {
    std::vector<Position> ids = ExpectedIds(request, token, kv_head);
    const int64_t group = shape().group(), d = shape().head_dim;
    const bool attend = request.want == Want::kAttend;
    if (attend) {
      EXPECT_TRUE(head.ids.empty());
    } else {
      CheckIds(request, head.ids, ids, token, kv_head);
      ids = head.ids;
    }
    const bool scores = request.want == Want::kIds || request.want == Want::kValues;
    ASSERT_EQ(head.out.size(), static_cast<size_t>(attend ? group * d : 0));
    for (int64_t h = 0; h < group; ++h) {
      const int64_t q_head = kv_head.value() * group + h;
      const float* query = QueryOf(token, q_head);
      std::vector<float> out;
      float lse = 0;
      context_->Attend(request.layer, q_head, query, ids, out, lse);
      if (scores && !ids.empty()) {
        ASSERT_EQ(head.scores.size(), static_cast<size_t>(group));
        std::vector<float> expected;
        for (Position j : ids) {
          expected.push_back(context_->Scores(request.layer, q_head, query, {j, j + 1})[0]);
        }
        EXPECT_LT(LogitError(head.scores[h], expected), kTolerance);
      }
      if (attend) {
        EXPECT_LT(RelativeError({&head.out[h * d], static_cast<size_t>(d)}, out), kTolerance);
        EXPECT_LT(LogitError({&head.lse[h], 1}, {&lse, 1}), kTolerance);
      }
      if (request.measure_mass) {
        std::vector<Position> zone;
        for (Position j = zone_.begin; j < zone_.end; ++j) zone.push_back(j);
        context_->Attend(request.layer, q_head, query, zone, out, lse);
        ASSERT_EQ(head.zone_lse.size(), static_cast<size_t>(group));
        EXPECT_LT(LogitError({&head.zone_lse[h], 1}, {&lse, 1}), kTolerance);
      }
    }
    EXPECT_EQ(head.zone_lse.empty(), !request.measure_mass);
    std::string k, v;
    for (Position j : ids) {
      if (!request.held.empty()) {
        const std::vector<Position>& held = request.held[kv_head.value()];
        if (std::find(held.begin(), held.end(), j) != held.end()) continue;
      }
      k.append(reinterpret_cast<const char*>(context_->keys(request.layer, kv_head) + j * d),
               2 * d);
      v.append(reinterpret_cast<const char*>(context_->values(request.layer, kv_head) + j * d),
               2 * d);
    }
    EXPECT_EQ(head.k, request.want == Want::kRows ? k : "");
    EXPECT_EQ(head.v, request.want == Want::kRows || request.want == Want::kValues ? v : "");
  }

  const uint64_t seed_ = TestSeed();
  std::string dir_;
  std::unique_ptr<RandomContext> context_;
  std::unique_ptr<Engine> engine_;
  std::shared_ptr<Session> session_;
  RowRange zone_;
  std::vector<float> queries_;
  uint64_t last_id_ = 0;
};

TEST_P(SessionTest, HeldRows_DoNotTravel) {
  for (const select::Selection& selection :
       {select::Selection(select::TopK{20}), select::Selection(select::All())}) {
    QueryRequest request = Request(selection, Want::kRows);
    request.held.resize(static_cast<size_t>(shape().kv_heads));
    for (Position id = 0; id < context_->spec().tokens; id += 2) request.held[0].push_back(id);
    request.held.back().push_back(std::min(zone_.begin, context_->spec().tokens - 1));
    const Collected answer = Answer(request);
    for (int64_t token = 0; token < kQueryTokens; ++token) {
      for (KvHead head(0); head.value() < shape().kv_heads; head = head.next()) {
        CheckHead(request, answer.heads[token * shape().kv_heads + head.value()], token, head);
      }
    }
  }
  QueryRequest request = Request(select::TopK{20}, Want::kValues);
  request.held.resize(static_cast<size_t>(shape().kv_heads));
  EXPECT_THAT(AskAndCollect(*session_, ++last_id_, request),
              StatusIs(StatusCode::kInvalidArgument, "need want ROWS"));
  request.want = Want::kRows;
  request.held[0] = {7, 7};
  EXPECT_THAT(AskAndCollect(*session_, ++last_id_, request),
              StatusIs(StatusCode::kInvalidArgument, "held row 7"));
}

TEST_P(SessionTest, RangeAndMass_SelectWhatTheirDefinitionsSay) {
  const int64_t group = shape().group();
  const std::vector<float> queries = context_->Queries(1, seed_ + 7, 3);
  for (const bool by_range : {true, false}) {
    for (const float bound : {0.05f, 0.5f, 0.9f, 1.0f}) {
      QueryRequest request;
      request.layer = Layer(1);
      request.tokens = 1;
      request.queries = queries;
      if (by_range) request.selection = select::Range{8 * bound};
      if (!by_range) request.selection = select::Mass{bound};
      request.want = Want::kIds;
      SCOPED_TRACE(absl::StrCat(by_range ? "range " : "mass ", bound));
      const auto answer = AskAndCollect(*session_, 1, request);
      CARREL_ASSERT_OK(answer);
      int64_t rows = 0;
      for (int32_t head = 0; head < shape().kv_heads; ++head) {
        const std::vector<Position>& ids = answer->heads[head].ids;
        rows += static_cast<int64_t>(ids.size());
        const std::set<Position> found(ids.begin(), ids.end());
        ASSERT_EQ(found.size(), ids.size());
        if (zone_.rows() == 0) {
          EXPECT_TRUE(ids.empty());
          continue;
        }
        if (GetParam().kind != IndexKind::kFlat) continue;  // exact only where the search is
        std::vector<double> least_mass;
        for (int64_t h = 0; h < group; ++h) {
          const float* query = &queries[(head * group + h) * shape().head_dim];
          const std::vector<double> scores =
              context_->Scores(request.layer, head * group + h, query, zone_);
          const double best = *std::max_element(scores.begin(), scores.end());
          double all = 0, kept = 0, but_last = 0;
          for (size_t j = 0; j < scores.size(); ++j) {
            const double weight = std::exp(scores[j] - best);
            const Position row = zone_.begin + static_cast<Position>(j);
            all += weight;
            if (found.contains(row)) kept += weight;
            if (found.contains(row) && row != ids.back()) but_last += weight;
            if (by_range && scores[j] > best - 8 * bound + 1e-4) {
              EXPECT_TRUE(found.contains(row)) << "row " << row << " of head " << h;
            }
          }
          if (!by_range) {
            EXPECT_GE(kept / all, bound - 1e-4);
          }
          least_mass.push_back(but_last / all);
        }
        if (!by_range && ids.size() > 1) {  // and no row more than that
          EXPECT_LT(*std::min_element(least_mass.begin(), least_mass.end()), bound + 1e-4);
        }
      }
      EXPECT_EQ(answer->statistics.rows, rows);
      // Attention over what is selected, and never more rows than allowed.
      *select::MaxRows(request.selection) = 7;
      const auto bounded = AskAndCollect(*session_, 2, request);
      CARREL_ASSERT_OK(bounded);
      for (const CollectedHead& head : bounded->heads) EXPECT_LE(head.ids.size(), 7u);
    }
  }
}

TEST_P(SessionTest, RangeAndMass_OutOfBounds_AreRefused) {
  QueryRequest request;
  request.layer = Layer(0);
  request.tokens = 1;
  request.queries = context_->Queries(1, 5);
  request.want = Want::kIds;
  const auto refused = [&](const select::Selection& selection, const char* what) {
    request.selection = selection;
    EXPECT_THAT(AskAndCollect(*session_, 1, request),
                StatusIs(absl::StatusCode::kInvalidArgument, what));
  };
  refused(select::Range{0, 0}, "range=0 is not a positive number");
  refused(select::Range{-1, 0}, "range=-1");
  refused(select::Range{INFINITY, 0}, "range=inf");
  refused(select::Mass{0, 0}, "mass=0 is outside (0, 1]");
  refused(select::Mass{1.5f, 0}, "mass=1.5");
  refused(select::Mass{NAN, 0}, "mass=nan");
  refused(select::Mass{0.5f, -1}, "max_rows=-1 is outside");
  refused(select::Mass{0.5f, int64_t{1} << 40}, "max_rows=1099511627776 is outside");
}

TEST_P(SessionTest, EveryWantAndSelect_EqualsPlainLoops) {
  for (Want want : {Want::kIds, Want::kRows, Want::kValues, Want::kAttend}) {
    for (int64_t top_k : {int64_t{-1}, int64_t{1}, int64_t{17}, zone_.rows(), int64_t{700}}) {
      for (bool mass : {false, true}) {
        if (top_k == 0) continue;  // an empty zone's size
        SCOPED_TRACE(absl::StrCat("want=", int(want), " top_k=", top_k, " mass=", mass));
        QueryRequest request = Request(select::TopK{top_k}, want);
        if (top_k < 0) request.selection = select::All();
        request.measure_mass = mass;
        const Collected answer = Answer(request);
        for (int64_t token = 0; token < kQueryTokens; ++token) {
          for (int32_t h = 0; h < shape().kv_heads; ++h) {
            CheckHead(request, answer.heads[token * shape().kv_heads + h], token, KvHead(h));
          }
        }
        EXPECT_GE(answer.statistics.search_us, 0);
        const int64_t units = kQueryTokens * shape().kv_heads;
        if (top_k < 0 || top_k >= zone_.rows() || GetParam().kind == IndexKind::kFlat) {
          EXPECT_EQ(answer.statistics.candidates, units * zone_.rows());
        } else {
          EXPECT_GT(answer.statistics.visited, 0);
        }
      }
    }
  }
}

TEST_P(SessionTest, RowsPerHead_EachHeadGetsItsOwn) {
  for (Want want : {Want::kIds, Want::kRows, Want::kValues, Want::kAttend}) {
    SCOPED_TRACE(absl::StrCat("want=", int(want)));
    QueryRequest request = Request(select::TopK{23}, want);
    for (int32_t h = 0; h < shape().kv_heads; ++h)
      std::get<select::TopK>(request.selection).of_head.push_back(h == 0 ? 23 : 2 + h);
    const Collected answer = Answer(request);
    for (int64_t token = 0; token < kQueryTokens; ++token) {
      for (int32_t h = 0; h < shape().kv_heads; ++h) {
        CheckHead(request, answer.heads[token * shape().kv_heads + h], token, KvHead(h));
      }
    }
  }
}

TEST_P(SessionTest, AttendOverAll_EqualsAttentionOverRowsOfAll) {
  const Collected rows = Answer(Request(select::All(), Want::kRows));
  const Collected attended = Answer(Request(select::All(), Want::kAttend));
  for (size_t unit = 0; unit < rows.heads.size(); ++unit) {
    const KvHead head(static_cast<int32_t>(unit % shape().kv_heads));
    for (int64_t h = 0; h < shape().group(); ++h) {
      const int64_t q_head = head.value() * shape().group() + h;
      std::vector<float> out;
      float lse;
      context_->Attend(Layer(1), q_head, QueryOf(unit / shape().kv_heads, q_head),
                       rows.heads[unit].ids, out, lse);
      EXPECT_LT(RelativeError({&attended.heads[unit].out[h * shape().head_dim], out.size()}, out),
                kTolerance);
    }
  }
}

TEST_P(SessionTest, CandidatesAskedAhead_TrueQueryChoosesAmongThem) {
  if (zone_.rows() == 0) GTEST_SKIP() << "no candidates in an empty zone";
  QueryRequest ahead = Request(select::TopK{40}, Want::kIds);
  ahead.queries = context_->Queries(kQueryTokens, seed_ + 2);  // another direction: a bad guess
  const Collected ahead_ids = Answer(ahead);
  ahead.speculative = true;
  const Collected kept = Answer(ahead);
  const uint64_t ahead_id = last_id_;
  for (const CollectedHead& head : kept.heads) EXPECT_TRUE(head.ids.empty());

  QueryRequest request = Request(select::TopK{10}, Want::kValues);
  request.among_candidates_of = ahead_id;
  for (int twice = 0; twice < 2; ++twice) {
    const Collected answer = Answer(request);
    EXPECT_EQ(answer.statistics.candidates, 40 * kQueryTokens * shape().kv_heads);
    for (int64_t token = 0; token < kQueryTokens; ++token) {
      for (int32_t h = 0; h < shape().kv_heads; ++h) {
        const CollectedHead& head = answer.heads[token * shape().kv_heads + h];
        const std::vector<Position>& candidates = ahead_ids.heads[token * shape().kv_heads + h].ids;
        ASSERT_EQ(head.ids.size(), 10u);
        // The best of the candidates: each lse is over the zone, in it what ZoneRest makes of the
        // others.
        const std::set<Position> allowed(candidates.begin(), candidates.end());
        for (size_t j = 0; j < head.ids.size(); ++j) {
          EXPECT_TRUE(allowed.contains(head.ids[j]));
          for (int64_t g = 0; g < shape().group(); ++g) {
            const int64_t q_head = h * shape().group() + g;
            const float expected = static_cast<float>(context_->Scores(
                Layer(1), q_head, QueryOf(token, q_head), {head.ids[j], head.ids[j] + 1})[0]);
            EXPECT_NEAR(head.scores[g][j], expected, 1e-4);
          }
        }
        // Over the candidates, and over the rest as it was for the guess, moved on by its slope.
        const auto sum_of = [&](int64_t q_head, const float* query, bool candidate) {
          double sum = 0;
          for (Position id = zone_.begin; id < zone_.end; ++id) {
            if (allowed.contains(id) != candidate) continue;
            sum += std::exp(context_->Scores(Layer(1), q_head, query, {id, id + 1})[0]);
          }
          return sum;
        };
        const std::vector<Position> sample =
            ZoneRest::Sample(zone_, std::vector<Position>(allowed.begin(), allowed.end()));
        std::vector<double> lse;
        for (int64_t g = 0; g < shape().group(); ++g) {
          const int64_t q_head = h * shape().group() + g;
          const float* guess =
              &ahead.queries[(token * shape().q_heads + q_head) * shape().head_dim];
          double moved = 0, weights = 0;
          for (Position id : sample) {
            const double at_guess = context_->Scores(Layer(1), q_head, guess, {id, id + 1})[0];
            const double at_query =
                context_->Scores(Layer(1), q_head, QueryOf(token, q_head), {id, id + 1})[0];
            moved += std::exp(at_guess) * (at_query - at_guess);
            weights += std::exp(at_guess);
          }
          lse.push_back(std::log(sum_of(q_head, QueryOf(token, q_head), true) +
                                 sum_of(q_head, guess, false) * std::exp(moved / weights)));
        }
        const auto best_of = [&](Position id) {
          double best = -INFINITY;
          for (int64_t g = 0; g < shape().group(); ++g) {
            const int64_t q_head = h * shape().group() + g;
            best = std::max(
                best, context_->Scores(Layer(1), q_head, QueryOf(token, q_head), {id, id + 1})[0] -
                          lse[static_cast<size_t>(g)]);
          }
          return best;
        };
        const std::set<Position> chosen(head.ids.begin(), head.ids.end());
        for (Position c : candidates) {
          if (chosen.contains(c)) continue;
          // hnsw estimates the zone's lse.
          const double tolerance = GetParam().kind == IndexKind::kFlat ? 1e-5 : 0.2;
          EXPECT_LE(best_of(c), best_of(head.ids.back()) + tolerance);
        }
      }
    }
  }
}

TEST_P(SessionTest, CandidatesOfTheSameQuery_GiveItsOwnBestRows) {
  if (zone_.rows() == 0) GTEST_SKIP() << "no candidates in an empty zone";
  if (GetParam().kind != IndexKind::kFlat) GTEST_SKIP() << "searches for 10 and for 40 differ";
  QueryRequest request = Request(select::TopK{10}, Want::kValues);
  const Collected direct = Answer(request);
  QueryRequest ahead = Request(select::TopK{40}, Want::kIds);
  ahead.speculative = true;
  Answer(ahead);
  request.among_candidates_of = last_id_;
  const Collected among = Answer(request);
  ASSERT_EQ(among.heads.size(), direct.heads.size());
  for (size_t unit = 0; unit < direct.heads.size(); ++unit) {
    EXPECT_EQ(among.heads[unit].ids, direct.heads[unit].ids);
  }
}

TEST_P(SessionTest, SpeculativeRowsThatMeasureMass_HaveBoth) {
  if (zone_.rows() == 0) GTEST_SKIP() << "no candidates in an empty zone";
  QueryRequest ahead = Request(select::TopK{30}, Want::kRows);
  ahead.speculative = true;
  const Collected plain = Answer(ahead);
  ahead.measure_mass = true;
  const Collected measured = Answer(ahead);
  ASSERT_EQ(measured.heads.size(), plain.heads.size());
  for (size_t unit = 0; unit < plain.heads.size(); ++unit) {
    EXPECT_EQ(measured.heads[unit].zone_lse.size(), static_cast<size_t>(shape().group()));
    // Where the index does not score the whole zone, it is measured exactly for this.
    if (GetParam().kind == IndexKind::kFlat) {
      EXPECT_EQ(measured.heads[unit].rest, plain.heads[unit].rest);
    }
  }
}

// Candidates that travel come with what the zone's other rows weigh, once for each token and head.
TEST_P(SessionTest, SpeculativeRows_SayWhatTheOthersWeigh) {
  if (zone_.rows() == 0) GTEST_SKIP() << "no candidates in an empty zone";
  QueryRequest ahead = Request(select::TopK{30}, Want::kRows);
  for (const CollectedHead& head : Answer(ahead).heads) EXPECT_TRUE(head.rest.empty());
  ahead.speculative = true;
  const Collected found = Answer(ahead);
  const int64_t group = shape().group(), d = shape().head_dim;
  for (int64_t token = 0; token < kQueryTokens; ++token) {
    for (int32_t kv_head = 0; kv_head < shape().kv_heads; ++kv_head) {
      const CollectedHead& head = found.heads[token * shape().kv_heads + kv_head];
      ASSERT_EQ(head.rest.size(), static_cast<size_t>(group * (1 + d)));
      const std::set<Position> given(head.ids.begin(), head.ids.end());
      std::vector<Position> others;
      for (Position j = zone_.begin; j < zone_.end; ++j) {
        if (!given.contains(j)) others.push_back(j);
      }
      for (int64_t h = 0; h < group; ++h) {
        const int64_t q_head = kv_head * group + h;
        const float* query = QueryOf(token, q_head);
        const float* rest = &head.rest[static_cast<size_t>(h * (1 + d))];
        float expected = 0;
        std::vector<float> out;
        context_->Attend(ahead.layer, q_head, query, others, out, expected);
        // Estimated where the index does not score the whole zone.
        const double tolerance = GetParam().kind == IndexKind::kFlat ? 1e-3 : 3;
        EXPECT_NEAR(std::inner_product(rest + 1, rest + 1 + d, query, rest[0]), expected,
                    tolerance);
      }
    }
  }
}

// What a query chooses are its own best rows, as far as they are among the candidates. What it does
// not know is the rest of the zone; taken to weigh as much beside the candidates as it did for the
// guess, it loses 0.5% of them here.
TEST_P(SessionTest, CandidatesOfANearbyQuery_LoseFewOfItsBestRows) {
  if (zone_.rows() == 0) GTEST_SKIP() << "no candidates in an empty zone";
  if (GetParam().kind != IndexKind::kFlat) GTEST_SKIP() << "searches for 40 and for 80 differ";
  int64_t held = 0, lost = 0;
  for (uint64_t round = 0; round < 30; ++round) {
    QueryRequest request = Request(select::TopK{40}, Want::kIds);
    request.queries = context_->Queries(kQueryTokens, seed_ + 100 + 2 * round);
    const std::vector<float> off = context_->Queries(kQueryTokens, seed_ + 101 + 2 * round);
    QueryRequest ahead = request;
    for (size_t i = 0; i < off.size(); ++i) ahead.queries[i] += 0.5f * off[i];
    ahead.selection = select::TopK{80};
    const Collected found = Answer(ahead);
    ahead.speculative = true;
    Answer(ahead);
    const uint64_t ahead_id = last_id_;
    const Collected best = Answer(request);
    request.among_candidates_of = ahead_id;
    const Collected chosen = Answer(request);
    for (size_t unit = 0; unit < best.heads.size(); ++unit) {
      const auto set_of = [&](const Collected& answer) {
        return std::set<Position>(answer.heads[unit].ids.begin(), answer.heads[unit].ids.end());
      };
      const std::set<Position> candidates = set_of(found), kept = set_of(chosen);
      for (Position id : best.heads[unit].ids) {
        held += candidates.contains(id);
        lost += candidates.contains(id) && !kept.contains(id);
      }
    }
  }
  const double share = static_cast<double>(lost) / static_cast<double>(held);
  EXPECT_GT(held, 0);
  EXPECT_LT(share, 0.002) << lost << " of " << held;
}

TEST_P(SessionTest, MoreThanTheCandidates_GivesAllOfThem) {
  if (zone_.rows() == 0) GTEST_SKIP() << "no candidates in an empty zone";
  QueryRequest ahead = Request(select::TopK{5}, Want::kIds);
  ahead.speculative = true;
  Answer(ahead);
  QueryRequest request = Request(select::TopK{700}, Want::kAttend);
  request.among_candidates_of = last_id_;
  const Collected attended = Answer(request);
  request.want = Want::kIds;
  const Collected ids = Answer(request);
  for (size_t unit = 0; unit < ids.heads.size(); ++unit) {
    EXPECT_EQ(ids.heads[unit].ids.size(), 5u);
    const int64_t q_head = static_cast<int64_t>(unit) % shape().kv_heads * shape().group();
    std::vector<float> out;
    float lse;
    context_->Attend(Layer(1), q_head, QueryOf(unit / shape().kv_heads, q_head),
                     ids.heads[unit].ids, out, lse);
    EXPECT_LT(RelativeError({attended.heads[unit].out.data(), out.size()}, out), kTolerance);
  }
}

TEST_P(SessionTest, FetchRows_GivesWhatIsStoredInTheOrderAsked) {
  const int64_t d = shape().head_dim;
  for (bool by_ids : {false, true}) {
    for (std::vector<KvHead> heads : {std::vector<KvHead>{}, std::vector<KvHead>{KvHead(1)}}) {
      FetchRequest request;
      request.layer = Layer(0);
      request.kv_heads = heads;
      request.by_ids = by_ids;
      request.range = {100, 300};
      request.ids = {699, 0, 127, 128, 5};
      const absl::StatusOr<std::unique_ptr<Reply>> reply = Ask(*session_, ++last_id_, request);
      CARREL_ASSERT_OK(reply);
      const absl::StatusOr<Collected> rows = Collect(**reply, 1, shape().kv_heads);
      CARREL_ASSERT_OK(rows);
      for (int32_t h = 0; h < shape().kv_heads; ++h) {
        std::string k, v;
        if (heads.empty() || heads[0] == KvHead(h)) {
          std::vector<Position> ids = request.ids;
          if (!by_ids) {
            ids.resize(200);
            for (int64_t j = 0; j < 200; ++j) ids[j] = 100 + j;
          }
          for (Position j : ids) {
            k.append(reinterpret_cast<const char*>(context_->keys(Layer(0), KvHead(h)) + j * d),
                     2 * d);
            v.append(reinterpret_cast<const char*>(context_->values(Layer(0), KvHead(h)) + j * d),
                     2 * d);
          }
        }
        EXPECT_EQ(rows->heads[h].k, k);
        EXPECT_EQ(rows->heads[h].v, v);
      }
    }
  }
}

TEST_P(SessionTest, SmallParts_JoinToTheSameReply) {
  for (Want want : {Want::kIds, Want::kRows, Want::kValues, Want::kAttend}) {
    for (const select::Selection& selection :
         {select::Selection(select::TopK{300}), select::Selection(select::All())}) {
      const QueryRequest request = Request(selection, want);
      std::vector<Collected> answers;
      for (int64_t part_bytes : {int64_t{1}, int64_t{4096}, int64_t{1} << 30}) {
        const auto reply = Ask(*session_, ++last_id_, request);
        CARREL_ASSERT_OK(reply);
        const auto answer = Collect(**reply, kQueryTokens, shape().kv_heads, part_bytes);
        CARREL_ASSERT_OK(answer);
        answers.push_back(*answer);
        for (CollectedHead& head : answers.back().heads) {
          if (part_bytes == 1 && want != Want::kAttend && !head.ids.empty()) {
            EXPECT_EQ(head.pieces, static_cast<int64_t>(head.ids.size()));
          }
          head.pieces = 0;
        }
      }
      EXPECT_EQ(answers[0].heads, answers[1].heads);
      EXPECT_EQ(answers[0].heads, answers[2].heads);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SessionTest,
                         testing::Values(SessionCase{"Flat", IndexKind::kFlat, 4, 60},
                                         SessionCase{"FlatWhole", IndexKind::kFlat, 0, 0},
                                         SessionCase{"FlatEmptyZone", IndexKind::kFlat, 500, 300},
                                         SessionCase{"Hnsw", IndexKind::kHnsw, 4, 60}),
                         [](const auto& info) { return info.param.name; });

TEST(AttendAll, SpansAndThreads_ChangeNoBit) {
  RandomContextSpec spec;
  spec.shape = {.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 16};
  spec.tokens = 3 * kAttendSpanRows + 77;
  spec.segment_tokens = 5000;
  spec.seed = TestSeed();
  const RandomContext context(spec);
  const std::string dir = FreshTempDir();
  MakeStore(dir, {&context});
  QueryRequest request;
  request.tokens = 2;
  request.queries = context.Queries(2, spec.seed + 1);
  request.selection = select::All();
  request.want = Want::kAttend;
  std::vector<Collected> answers;
  for (int32_t threads : {1, 2, 5}) {
    EngineConfig config;
    config.search_threads = threads;
    const auto engine = *Engine::Create(config, *Store::Open(dir + "/store", StoreMode::kReadOnly));
    const auto session = engine->OpenSession(context.Opening(3, 5));
    CARREL_ASSERT_OK(session);
    const auto answer = AskAndCollect(**session, 1, request);
    CARREL_ASSERT_OK(answer);
    answers.push_back(*answer);
  }
  EXPECT_EQ(answers[0].heads, answers[1].heads);
  EXPECT_EQ(answers[0].heads, answers[2].heads);
  // Few threads took spans, many their blocks.
  const RowRange whole{3, spec.tokens - 5};
  EXPECT_LT(AttendCut(whole, 2, 1, 1).size(), AttendCut(whole, 2, 1, 5).size());
  std::vector<Position> zone;
  for (Position j = 3; j < spec.tokens - 5; ++j) zone.push_back(j);
  std::vector<float> out;
  float lse;
  context.Attend(Layer(0), 1, &request.queries[spec.shape.head_dim], zone, out, lse);
  EXPECT_LT(RelativeError({&answers[0].heads[0].out[spec.shape.head_dim], out.size()}, out), 1e-5);
}

TEST(AttendCut, AnyZone_IsCoveredOnceInOrder) {
  for (int64_t rows : {int64_t{0}, int64_t{1}, kAttendSpanRows, kAttendSpanRows + 1, int64_t{60000},
                       int64_t{1000000}, int64_t{1} << 24}) {
    for (const auto& [tokens, threads] : {std::pair{1, 1}, std::pair{1, 16}, std::pair{64, 16}}) {
      const RowRange zone{7, 7 + rows};
      const std::vector<RowRange> cut = AttendCut(zone, tokens, /*kv_heads=*/2, threads);
      EXPECT_LE(static_cast<int64_t>(cut.size()), AttendMostCut(zone, tokens));
      Position at = zone.begin;
      for (const RowRange& part : cut) {
        EXPECT_EQ(part.begin, at);
        EXPECT_GT(part.rows(), 0);
        // No part lies in two spans.
        const int64_t length = AttendSpanLength(zone);
        EXPECT_EQ((part.begin - 7) / length, (part.end - 1 - 7) / length);
        at = part.end;
      }
      EXPECT_EQ(at, zone.end);
    }
  }
}

}  // namespace
}  // namespace carrel::kvstore
