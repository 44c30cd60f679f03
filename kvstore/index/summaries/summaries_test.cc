#include "kvstore/index/summaries/summaries.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>

#include "common/checksum.h"
#include "common/dtype.h"
#include "common/test_util.h"
#include "common/thread_pool.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/building/accelerator.h"
#include "kvstore/index/index_test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

struct State {
  std::vector<float> out, lse;
};

// Keys, V rows and their summaries in memory.
class SummariesTest : public testing::Test {
 protected:
  void Make(int64_t count, int64_t d, int64_t cluster_rows, const SampledQueries* sampled) {
    keys_ = MakeKeys(rng_, count, d);
    // V rows of neighbours in the same cluster are alike, in part.
    values_ = MakeKeys(rng_, count, d);
    for (int64_t i = 0; i < count * d; ++i) {
      values_.keys[i] =
          FloatToBf16(Bf16ToFloat(values_.keys[i]) / 8 + Bf16ToFloat(keys_.keys[i]) / 4);
    }
    const auto blob = BuildSummaries(cluster_rows, keys_.AsRows(), values_.AsRows(), sampled);
    CARREL_ASSERT_OK(blob);
    blob_ = *blob;
    const auto summaries = Summaries::Open(blob_, count, d);
    CARREL_ASSERT_OK(summaries);
    summaries_ = *summaries;
    scale_ = 1 / std::sqrt(static_cast<float>(d));
  }

  // By plain loops.
  State Attend(const std::vector<float>& q, int64_t group, const std::vector<Position>& rows) {
    const int64_t d = keys_.head_dim;
    State state{std::vector<float>(static_cast<size_t>(group * d)), {}};
    for (int64_t h = 0; h < group; ++h) {
      std::vector<double> scores, sum(static_cast<size_t>(d));
      for (Position j : rows) scores.push_back(Score(&q[h * d], j));
      const double top = rows.empty() ? 0 : *std::max_element(scores.begin(), scores.end());
      double total = 0;
      for (size_t i = 0; i < rows.size(); ++i) {
        const double weight = std::exp(scores[i] - top);
        total += weight;
        for (int64_t c = 0; c < d; ++c) sum[c] += weight * Bf16ToFloat(values_.Row(rows[i])[c]);
      }
      for (int64_t c = 0; c < d; ++c) state.out[h * d + c] = static_cast<float>(sum[c] / total);
      state.lse.push_back(static_cast<float>(top + std::log(total)));
    }
    return state;
  }
  double Score(const float* q, Position j) const {
    double sum = 0;
    for (int64_t c = 0; c < keys_.head_dim; ++c) sum += double{q[c]} * Bf16ToFloat(keys_.Row(j)[c]);
    return sum * scale_;
  }

  absl::StatusOr<State> Estimate(const std::vector<float>& q, int64_t group, RowRange zone,
                                 const std::vector<Position>& selected, bool scores = true,
                                 const std::vector<float>& shares = {},
                                 const float* bound = nullptr, ThreadPool* pool = nullptr) {
    const int64_t d = keys_.head_dim;
    const size_t states = std::max<size_t>(1, shares.size()) * static_cast<size_t>(group);
    State state{std::vector<float>(states * static_cast<size_t>(d), NAN),
                std::vector<float>(states, NAN)};
    std::vector<float> given;
    for (int64_t h = 0; h < group; ++h) {
      for (Position j : selected) given.push_back(static_cast<float>(Score(&q[h * d], j)));
    }
    const Rows values = values_.AsRows();
    retrieval::EstimateRequest params;
    params.queries = q.data();
    params.group = group;
    params.scale = scale_;
    params.zone = zone;
    params.selected = selected;
    params.scores = scores ? given.data() : nullptr;
    params.bound = bound;
    params.spread_shares = shares;
    params.pool = pool;
    params.out = state.out.data();
    params.lse = state.lse.data();
    EstimateScratch scratch;
    const absl::Status status = EstimateRest(summaries_, values, params, scratch);
    if (!status.ok()) return status;
    return state;
  }

  std::vector<Position> All(RowRange zone) {
    std::vector<Position> rows;
    for (Position j = zone.begin; j < zone.end; ++j) rows.push_back(j);
    return rows;
  }
  // The best rows of a zone by the best score of a head.
  std::vector<Position> Best(const std::vector<float>& q, int64_t group, RowRange zone, size_t n) {
    std::vector<std::pair<double, Position>> order;
    for (Position j : All(zone)) {
      double best = -INFINITY;
      for (int64_t h = 0; h < group; ++h) best = std::max(best, Score(&q[h * keys_.head_dim], j));
      order.push_back({-best, j});
    }
    std::sort(order.begin(), order.end());
    std::vector<Position> rows;
    for (size_t i = 0; i < n; ++i) rows.push_back(order[i].second);
    return rows;
  }

  std::mt19937_64 rng_{TestSeed()};
  KeySet keys_, values_;
  std::string blob_;
  Summaries summaries_;
  float scale_ = 0;
};

double ErrorOf(const State& state, const State& truth) {
  return RelativeError(state.out, truth.out);
}

TEST_F(SummariesTest, Build_Twice_SameBytesAndAsManyAsPlanned) {
  for (const int64_t count : {1, 39, 40, 41, 700, 9000}) {
    Make(count, 32, 40, nullptr);
    EXPECT_EQ(blob_, *BuildSummaries(40, keys_.AsRows(), values_.AsRows(), nullptr));
    ThreadPool pool(2);
    EXPECT_EQ(blob_,
              *BuildSummaries(40, keys_.AsRows(), values_.AsRows(), nullptr, nullptr, &pool));
    EXPECT_LE(static_cast<int64_t>(blob_.size()),
              4096 + 2 * 128 + 2 * 80 + count * SummaryBytesPerKey(40, 32));
  }
}

// At head_dim 128 all of it is at most 8 bytes per key.
TEST_F(SummariesTest, Layout_FortyRowsPerCluster_EightBytesPerKey) {
  const SummaryLayout layout(1 << 20, 128, 40);
  EXPECT_EQ(layout.max_clusters(), 205);
  EXPECT_LE(layout.blob_bytes(), (int64_t{8} << 20) + 4096);
}

TEST_F(SummariesTest, Layout_ManySegments_NoneCrossesAChunk) {
  const SummaryLayout layout(int64_t{40} << 20, 128, 16);
  int64_t end = 0;
  for (int64_t s = 0; s < layout.segments(); ++s) {
    EXPECT_GE(layout.Offset(s), end);
    end = layout.Offset(s) + layout.SegmentBytes(s);
    EXPECT_EQ(layout.Offset(s) >> 26, (end - 1) >> 26);
  }
  EXPECT_EQ(end, layout.blob_bytes());
  EXPECT_GT(end, int64_t{64} << 20);
}

TEST_F(SummariesTest, EstimateRest_OneRowPerCluster_IsAttentionToWhatIsLeft) {
  // As many clusters as rows that differ: what is left over is known but for int8.
  Make(1000, 32, 4, nullptr);
  for (int64_t i = 0; i < 1000; ++i) {
    std::copy_n(keys_.Row(i / 8 * 8), 32, keys_.keys.begin() + i * 32);
    std::copy_n(values_.Row(i / 8 * 8), 32, values_.keys.begin() + i * 32);
  }
  summaries_ =
      *Summaries::Open(*BuildSummaries(4, keys_.AsRows(), values_.AsRows(), nullptr), 1000, 32);
  const std::vector<float> q = MakeQueries(rng_, keys_, 4);
  std::vector<float> wide(keys_.keys.size());
  WidenToFloat(DType::kBf16, keys_.keys.data(), static_cast<int64_t>(wide.size()), wide.data());
  const auto less_in_magnitude = [](float a, float b) { return std::abs(a) < std::abs(b); };
  for (const RowRange zone : {RowRange{0, 1000}, {3, 940}, {0, 300}, {700, 1000}, {400, 600}}) {
    std::set<Position> selected;
    while (selected.size() < 70) {
      selected.insert(zone.begin + static_cast<int64_t>(rng_() % uint64_t(zone.rows())));
    }
    std::vector<Position> left;
    for (Position j : All(zone)) {
      if (selected.count(j) == 0) left.push_back(j);
    }
    const auto state = Estimate(q, 4, zone, {selected.begin(), selected.end()});
    CARREL_ASSERT_OK(state);
    const State truth = Attend(q, 4, left);
    // Half a step of int8 in every coordinate, all to one side, is the most that a score can be
    // off.
    const double step = *std::max_element(wide.begin(), wide.end(), less_in_magnitude);
    double most = 0;
    for (int h = 0; h < 4; ++h) {
      double sum = 0;
      for (int c = 0; c < 32; ++c) sum += std::abs(q[h * 32 + c]);
      const double off = sum * std::abs(step) / 127 / 2 / std::sqrt(32.0);
      most = std::max(most, off);
      EXPECT_NEAR(state->lse[h], truth.lse[h], 0.15 + 2 * off);
    }
    EXPECT_LT(ErrorOf(*state, truth), 0.1 + 2 * most) << zone.begin << " " << zone.end;
  }
}

TEST_F(SummariesTest, EstimateRest_SegmentsByAnyThreads_SameBits) {
  Make(2100, 32, 4, nullptr);  // three segments
  const std::vector<float> q = MakeQueries(rng_, keys_, 3);
  ThreadPool pool(3);
  for (const RowRange zone : {RowRange{0, 2100}, {5, 2090}, {1500, 1600}, {900, 1030}}) {
    const std::vector<Position> selected = Best(q, 3, zone, 30);
    const std::vector<float> bound = {0.5f, 1.0f, 2.0f};
    for (const std::vector<float>& shares : {std::vector<float>{}, {0.1f, 0.6f}}) {
      const auto alone = Estimate(q, 3, zone, selected, true, shares, bound.data());
      const auto shared = Estimate(q, 3, zone, selected, true, shares, bound.data(), &pool);
      CARREL_ASSERT_OK(alone);
      CARREL_ASSERT_OK(shared);
      EXPECT_EQ(alone->out, shared->out);
      EXPECT_EQ(alone->lse, shared->lse);
    }
  }
}

// One segment, which many threads take by heads.
TEST_F(SummariesTest, EstimateRest_HeadsByManyThreads_SameBits) {
  Make(1900, 64, 10, nullptr);
  ThreadPool pool(15);
  for (const int64_t group : {1, 4, 5, 7, 8, 19}) {
    const std::vector<float> q = MakeQueries(rng_, keys_, group);
    const std::vector<float> bound(static_cast<size_t>(group), 1.5f);
    for (const RowRange zone : {RowRange{4, 1850}, {1000, 1200}}) {
      for (const size_t rows : {size_t{3}, size_t{190}}) {
        const std::vector<Position> selected = Best(q, group, zone, rows);
        for (const bool scores : {true, false}) {
          const auto alone = Estimate(q, group, zone, selected, scores, {}, bound.data());
          const auto shared = Estimate(q, group, zone, selected, scores, {}, bound.data(), &pool);
          CARREL_ASSERT_OK(alone);
          CARREL_ASSERT_OK(shared);
          EXPECT_EQ(alone->out, shared->out) << group << " heads, " << rows << " rows";
          EXPECT_EQ(alone->lse, shared->lse);
        }
      }
    }
  }
}

TEST_F(SummariesTest, EstimateRest_EverythingSelected_IsTheEmptyState) {
  Make(700, 32, 40, nullptr);
  const std::vector<float> q = MakeQueries(rng_, keys_, 2);
  for (const RowRange zone : {RowRange{0, 700}, {5, 640}, {100, 150}, {3, 3}}) {
    std::vector<Position> selected = All(zone);
    std::shuffle(selected.begin(), selected.end(), rng_);
    const auto state = Estimate(q, 2, zone, selected);
    CARREL_ASSERT_OK(state);
    for (float x : state->lse) EXPECT_EQ(x, -INFINITY);
    for (float x : state->out) EXPECT_EQ(x, 0.0f);
  }
}

// Merged with exact attention to the best rows, it comes much nearer to attention to all.
TEST_F(SummariesTest, EstimateRest_BesideTheBestRows_ReducesTheError) {
  const int64_t group = 4, d = 64;
  SampledQueries sampled{.group = group, .head_dim = d};
  KeySet of_queries = MakeKeys(rng_, 3000, d);
  for (Position i = 0; i < 16; ++i) {
    sampled.positions.push_back(i);
    for (float x : MakeQueries(rng_, of_queries, group)) sampled.queries.push_back(x);
  }
  for (const SampledQueries* learned : {static_cast<const SampledQueries*>(nullptr),
                                        static_cast<const SampledQueries*>(&sampled)}) {
    Make(9000, d, 40, learned);
    double with = 0, without = 0;
    for (int trial = 0; trial < 3; ++trial) {
      std::vector<float> q = MakeQueries(rng_, keys_, group);
      for (float& x : q) x *= 0.3f;  // flat
      const RowRange zone{4, 8900};
      const std::vector<Position> best = Best(q, group, zone, 100);
      const State truth = Attend(q, group, All(zone));
      State state = Attend(q, group, best);
      without += ErrorOf(state, truth);
      const auto rest = Estimate(q, group, zone, best);
      CARREL_ASSERT_OK(rest);
      kernels::MergeStates(state.out.data(), state.lse.data(), rest->out.data(), rest->lse.data(),
                           group, d);
      with += ErrorOf(state, truth);
      // An estimate: these queries are unlike those that it learned from.
      for (int h = 0; h < group; ++h) EXPECT_NEAR(state.lse[h], truth.lse[h], 1.5);
    }
    EXPECT_LT(with, without / 3);
  }
}

// What a context of version 1 says: no share, and zeros where it stands now.
std::string AsVersion1(std::string blob, int64_t d) {
  blob[4] = 1;
  std::fill_n(blob.begin() + 6, 2, '\0');
  std::fill_n(blob.begin() + 24, 4, '\0');
  const uint32_t crc = Crc32c(blob.substr(0, 60) + blob.substr(64, static_cast<size_t>(4 * d)));
  std::memcpy(&blob[60], &crc, sizeof(crc));
  return blob;
}

TEST_F(SummariesTest, SetEstimateFit_IsReadBack_AndVersion1HasTheDefault) {
  Make(700, 32, 40, nullptr);
  EXPECT_EQ(summaries_.fit().spread_share, kDefaultSpreadShare);
  EXPECT_FALSE(summaries_.fit().left_out);
  std::string blob = blob_;
  SetEstimateFit({0.05f, true}, blob);
  Summaries fitted = *Summaries::Open(blob, 700, 32);
  EXPECT_EQ(fitted.fit().spread_share, 0.05f);
  EXPECT_TRUE(fitted.fit().left_out);
  EXPECT_EQ(blob.substr(64), blob_.substr(64));
  fitted = *Summaries::Open(AsVersion1(blob, 32), 700, 32);
  EXPECT_EQ(fitted.fit().spread_share, kDefaultSpreadShare);
  EXPECT_FALSE(fitted.fit().left_out);
  SetEstimateFit({1.5f, false}, blob);
  EXPECT_THAT(Summaries::Open(blob, 700, 32), StatusIs(StatusCode::kDataLoss, "spread share 1.5"));
}

TEST_F(SummariesTest, EstimateRest_ShareOfTheHead_CountsUnlessAnotherIsGiven) {
  Make(3000, 64, 40, nullptr);
  const std::vector<float> q = MakeQueries(rng_, keys_, 2);
  const RowRange zone{4, 2900};
  const std::vector<Position> best = Best(q, 2, zone, 50);
  const State none = *Estimate(q, 2, zone, best, true, {0.0f});
  const State whole = *Estimate(q, 2, zone, best, true, {1.0f});
  SetEstimateFit({1.0f, false}, blob_);
  summaries_ = *Summaries::Open(blob_, 3000, 64);
  EXPECT_EQ(Estimate(q, 2, zone, best)->lse, whole.lse);
  for (int h = 0; h < 2; ++h) EXPECT_GT(whole.lse[h], none.lse[h]);
  SetEstimateFit({1.0f, true}, blob_);  // left out
  summaries_ = *Summaries::Open(blob_, 3000, 64);
  const State empty = *Estimate(q, 2, zone, best);
  EXPECT_EQ(empty.lse, std::vector<float>(2, -INFINITY));
  EXPECT_EQ(empty.out, std::vector<float>(2 * 64, 0.0f));
  EXPECT_EQ(Estimate(q, 2, zone, best, true, {1.0f})->lse, whole.lse);
}

// Whatever the spreads say, no row counts for more than the bound; and means of keys alone count for
// no more than the rows do (Jensen), up to what int8 rounds.
TEST_F(SummariesTest, EstimateRest_SeveralShares_EachAsAlone) {
  const int64_t d = 64, group = 3;
  Make(5000, d, 40, nullptr);
  const std::vector<float> q = MakeQueries(rng_, keys_, group);
  const std::vector<float> shares = {0, 0.05f, 0.1f, 0.2f, 0.35f, 0.6f, 1};
  for (const RowRange zone : {RowRange{4, 4990}, RowRange{4, 700}}) {
    const std::vector<Position> best = Best(q, group, zone, 60);
    const std::vector<float> bound(group, 1.5f);
    const State all = *Estimate(q, group, zone, best, true, shares, bound.data());
    for (size_t i = 0; i < shares.size(); ++i) {
      const State alone = *Estimate(q, group, zone, best, true, {shares[i]}, bound.data());
      EXPECT_TRUE(std::equal(alone.out.begin(), alone.out.end(),
                             all.out.begin() + static_cast<ptrdiff_t>(i * alone.out.size())));
      EXPECT_TRUE(std::equal(alone.lse.begin(), alone.lse.end(),
                             all.lse.begin() + static_cast<ptrdiff_t>(i * group)));
    }
  }
}

TEST_F(SummariesTest, EstimateRest_StaysBetweenItsBounds) {
  Make(4000, 64, 40, nullptr);
  const RowRange zone{4, 3900};
  for (int trial = 0; trial < 5; ++trial) {
    std::vector<float> q = MakeQueries(rng_, keys_, 2);
    for (float& x : q) x *= 3;  // sharp
    const std::vector<Position> best = Best(q, 2, zone, 64);
    const std::set<Position> selected(best.begin(), best.end());
    std::vector<Position> left;
    for (Position j : All(zone)) {
      if (selected.count(j) == 0) left.push_back(j);
    }
    std::vector<float> bound;
    for (int h = 0; h < 2; ++h) {
      double most = -INFINITY;
      for (Position j : left) most = std::max(most, Score(&q[h * 64], j));
      bound.push_back(static_cast<float>(most));
    }
    const State bounded = *Estimate(q, 2, zone, best, true, {1.0f}, bound.data());
    for (int h = 0; h < 2; ++h) {
      EXPECT_LE(bounded.lse[h], bound[h] + std::log(static_cast<float>(left.size())) + 1e-4f);
    }
    // Of whole clusters: where rows are taken out of one, the rounding of its mean counts more in the rest.
    const RowRange all{0, 4000};
    const State lower = *Estimate(q, 2, all, {}, true, {0.0f});
    const State truth = Attend(q, 2, All(all));
    float most = 0;
    for (const uint16_t key : keys_.keys) most = std::max(most, std::abs(Bf16ToFloat(key)));
    for (int h = 0; h < 2; ++h) {
      float sum = 0;
      for (int c = 0; c < 64; ++c) sum += std::abs(q[static_cast<size_t>(h * 64 + c)]);
      const float rounding =
          sum * 2 * most / 127 / 2 / 8;  // of a mean in int8, and the centre; scale 1/8
      EXPECT_LE(lower.lse[h], truth.lse[h] + rounding);
    }
  }
}

TEST_F(SummariesTest, Open_WrongShapeOrTruncated_IsDataLoss) {
  Make(700, 32, 40, nullptr);
  EXPECT_THAT(Summaries::Open(blob_, 701, 32), StatusIs(StatusCode::kDataLoss, "of 700 rows"));
  EXPECT_THAT(Summaries::Open(blob_, 700, 64), StatusIs(StatusCode::kDataLoss, "of 700 rows"));
  for (size_t size = 0; size < blob_.size(); size += size < 70 ? 1 : 211) {
    EXPECT_THAT(Summaries::Open(blob_.substr(0, size), 700, 32),
                StatusIs(StatusCode::kDataLoss, "summaries"));
  }
}

TEST_F(SummariesTest, Open_AnyBitOfTheHeaderFlipped_IsDataLoss) {
  Make(100, 32, 40, nullptr);
  for (size_t i = 0; i < 64 + 4 * 32; ++i) {
    std::string damaged = blob_;
    damaged[i] ^= static_cast<char>(1 << (rng_() % 8));
    EXPECT_THAT(Summaries::Open(damaged, 100, 32), StatusIs(StatusCode::kDataLoss, "summaries"))
        << "byte " << i;
  }
}

// Bytes in memory have no CRC of their own behind the header: whatever they say, nothing outside
// of them is read, and what contradicts itself is told.
TEST_F(SummariesTest, EstimateRest_DamagedSegments_DataLossOrAnAnswer) {
  Make(300, 16, 40, nullptr);
  const std::vector<float> q = MakeQueries(rng_, keys_, 2);
  const std::string intact = blob_;
  int64_t refused = 0;
  for (size_t i = 4096; i < intact.size(); ++i) {
    std::string damaged = intact;
    damaged[i] ^= static_cast<char>(1 << (rng_() % 8));
    summaries_ = *Summaries::Open(damaged, 300, 16);
    for (const RowRange zone : {RowRange{4, 290}, {0, 60}}) {
      const auto state = Estimate(q, 2, zone, Best(q, 2, zone, 20));
      if (state.ok()) continue;
      EXPECT_THAT(state, StatusIs(StatusCode::kDataLoss, "summaries"));
      ++refused;
    }
  }
  EXPECT_GT(refused, 50);  // sizes, exponents of scales, clusters of rows
}

TEST_F(SummariesTest, EstimateRest_EachContradiction_IsTold) {
  Make(300, 16, 40, nullptr);
  const std::vector<float> q = MakeQueries(rng_, keys_, 2);
  const RowRange zone{4, 290};
  const std::vector<Position> selected = Best(q, 2, zone, 20);
  const int64_t at = summaries_.layout().Offset(0), clusters = 8;
  const int64_t row_clusters = at + summaries_.layout().RowClustersOffset(clusters);
  ASSERT_EQ(summaries_.layout().ClustersOf(0), clusters);
  const auto estimate_with = [&](int64_t offset, auto value) {
    std::string damaged = blob_;
    std::memcpy(&damaged[static_cast<size_t>(offset)], &value, sizeof(value));
    summaries_ = *Summaries::Open(damaged, 300, 16);
    return Estimate(q, 2, zone, selected).status();
  };
  const auto size_of = [&](int64_t c) {
    uint32_t size = 0;
    std::memcpy(&size, &blob_[static_cast<size_t>(at + 4 * c)], sizeof(size));
    return size;
  };
  const auto data_loss = [](const char* message) {
    return StatusIs(StatusCode::kDataLoss, message);
  };
  EXPECT_THAT(estimate_with(at, size_of(0) + 1), data_loss("of 301 rows instead of 300"));
  for (const int64_t part : {1, 2, 3}) {  // scales of keys, of V rows, spreads
    for (const float x : {-1.0f, 2e18f, INFINITY, -INFINITY, NAN, -NAN}) {
      EXPECT_THAT(estimate_with(at + 4 * (part * clusters + 3), x), data_loss("cluster 3: scales"));
    }
    for (const float x : {0.0f, -0.0f, 1e18f}) {
      CARREL_EXPECT_OK(estimate_with(at + 4 * (part * clusters + 3), x));
    }
  }
  for (const Position row : {Position{0}, Position{295}, selected[7]}) {
    EXPECT_THAT(estimate_with(row_clusters + row, uint8_t{8}),
                data_loss("a row of cluster 8 of 8"));
  }
  // A cluster that is said to be empty, and a row of it that is taken out.
  const auto c = static_cast<uint8_t>(blob_[static_cast<size_t>(row_clusters + selected[0])]);
  const uint64_t two_sizes =
      c == 0 ? uint64_t{size_of(0) + size_of(1)} << 32 : uint64_t{size_of(c - 1) + size_of(c)};
  EXPECT_THAT(estimate_with(at + 4 * (c == 0 ? 0 : c - 1), two_sizes), data_loss("lost rows"));
}

// Over several segments, of which the zone covers all, most or little.
TEST_F(SummariesTest, EstimateRest_SelectedInAnyOrder_SameBits) {
  Make(3000, 32, 4, nullptr);
  const std::vector<float> q = MakeQueries(rng_, keys_, 3);
  for (const RowRange zone : {RowRange{4, 2990}, {1000, 1100}, {900, 2200}}) {
    std::vector<Position> selected = Best(q, 3, zone, 60);
    const State best_first = *Estimate(q, 3, zone, selected);
    std::sort(selected.begin(), selected.end());
    const State by_id = *Estimate(q, 3, zone, selected);
    EXPECT_EQ(best_first.out, by_id.out);
    EXPECT_EQ(best_first.lse, by_id.lse);
  }
}

// Writes one byte of each segment, or fails.
class FakeAccelerator final : public Accelerator {
 public:
  explicit FakeAccelerator(absl::Status status) : status_(std::move(status)) {}

  absl::Status EncodeKeys(const CodeMap&, const Rows&, char*) override { return status_; }
  absl::StatusOr<NearestKeys> FindNearest(const std::vector<float>&, const std::vector<Position>&,
                                          const Rows&, int64_t) override {
    return status_;
  }
  absl::StatusOr<std::vector<float>> TrainLists(const std::vector<float>&, int64_t,
                                                int64_t) override {
    return status_;
  }
  absl::StatusOr<std::vector<float>> Summarise(const SummaryPlan& plan, const SummaryLayout& layout,
                                               const Rows& keys, const Rows&, char* blob) override {
    plan_ = plan;
    if (!status_.ok()) return status_;
    for (int64_t s = 0; s < layout.segments(); ++s) blob[layout.Offset(s)] = kByte;
    return std::vector<float>(static_cast<size_t>(keys.head_dim()), 0.5f);
  }

  static constexpr char kByte = 77;
  const SummaryPlan& plan() const { return plan_; }

 private:
  const absl::Status status_;
  SummaryPlan plan_;
};

TEST_F(SummariesTest, Build_WithAnAccelerator_ItsBytesOrTheCpus) {
  const int64_t rows = 9000, d = 32;
  SampledQueries sampled{.group = 2, .head_dim = d};
  for (Position i = 0; i < 200; ++i) {
    sampled.positions.push_back(i);
    for (float x : RandomNormal(rng_, 2 * d)) sampled.queries.push_back(x);
  }
  Make(rows, d, 40, &sampled);
  const auto build = [&](Accelerator& accelerator) {
    return BuildSummaries(40, keys_.AsRows(), values_.AsRows(), &sampled, &accelerator);
  };
  FakeAccelerator serves(absl::OkStatus()), serves_not(absl::UnimplementedError("")),
      fails(absl::ResourceExhaustedError("no memory"));
  const auto blob = build(serves);
  CARREL_ASSERT_OK(blob);
  const auto summaries = Summaries::Open(*blob, rows, d);
  CARREL_ASSERT_OK(summaries);
  EXPECT_EQ(summaries->centre(), std::vector<float>(d, 0.5f));
  for (int64_t s = 0; s < 2; ++s) {
    EXPECT_EQ((*blob)[summaries->layout().Offset(s)], FakeAccelerator::kByte);
  }
  EXPECT_EQ(serves.plan().transform.size(), d * d);
  EXPECT_EQ(serves.plan().queries.size(), 128 * d);
  EXPECT_EQ(*build(serves_not), blob_);
  EXPECT_THAT(build(fails), StatusIs(StatusCode::kResourceExhausted, "no memory"));
}

TEST_F(SummariesTest, Build_BadRequests_AreInvalidArgument) {
  const KeySet keys = MakeKeys(rng_, 10, 8), more = MakeKeys(rng_, 11, 8);
  EXPECT_THAT(BuildSummaries(3, keys.AsRows(), keys.AsRows(), nullptr),
              StatusIs(StatusCode::kInvalidArgument, "summaries=3"));
  EXPECT_THAT(BuildSummaries(40, keys.AsRows(), more.AsRows(), nullptr),
              StatusIs(StatusCode::kInvalidArgument, "10 keys of 8 and 11 V rows"));
}

}  // namespace
}  // namespace carrel::kvstore
