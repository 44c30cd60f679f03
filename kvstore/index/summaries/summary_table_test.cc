#include "kvstore/index/summaries/summary_table.h"

#include <algorithm>
#include <cmath>

#include "common/dtype.h"
#include "common/test_util.h"
#include "kvstore/index/index_test_util.h"

namespace carrel::kvstore {
namespace {

// A table's term where nothing is selected is that of the summaries it was made of.
class SummaryTableTest : public testing::Test {
 protected:
  static constexpr int64_t kRows = 20'000, kDim = 32, kGroup = 3;

  void SetUp() override {
    keys_ = MakeKeys(rng_, kRows, kDim);
    values_ = MakeKeys(rng_, kRows, kDim);
    const auto blob = BuildSummaries(40, keys_.AsRows(), values_.AsRows(), nullptr);
    CARREL_ASSERT_OK(blob);
    blob_ = *blob;
  }

  Summaries Open(const EstimateFit& fit) {
    SetEstimateFit(fit, blob_);
    return *Summaries::Open(blob_, kRows, kDim);
  }

  // [kGroup, kDim + 1]: out and lse, by plain loops.
  std::vector<float> OfTable(const kernels::SummaryTable& table, const std::vector<float>& q) {
    std::vector<float> state;
    for (int64_t h = 0; h < kGroup; ++h) {
      double of_centre = 0, norm = 0, total = 0;
      std::vector<double> sum(kDim);
      for (int64_t i = 0; i < kDim; ++i) {
        of_centre += scale_ * q[h * kDim + i] * table.centre[i];
        norm += double{scale_} * scale_ * q[h * kDim + i] * q[h * kDim + i];
      }
      for (size_t c = 0; c < table.clusters.size(); ++c) {
        const auto& cluster = table.clusters[c];
        double score = of_centre + cluster.spread * norm / 2;
        for (int64_t i = 0; i < kDim; ++i) {
          score += scale_ * q[h * kDim + i] * cluster.key_scale * table.keys[c * kDim + i];
        }
        const double e = cluster.rows * std::exp(score);
        total += e;
        for (int64_t i = 0; i < kDim; ++i) {
          sum[i] += e * cluster.value_scale * table.values[c * kDim + i];
        }
      }
      for (int64_t i = 0; i < kDim; ++i) {
        state.push_back(total == 0 ? 0 : static_cast<float>(sum[i] / total));
      }
      state.push_back(static_cast<float>(std::log(total)));
    }
    return state;
  }

  std::vector<float> OfSummaries(const Summaries& summaries, RowRange zone,
                                 const std::vector<float>& q) {
    std::vector<float> out(kGroup * kDim), lse(kGroup), state;
    const Rows values = values_.AsRows();
    retrieval::EstimateRequest params;
    params.queries = q.data();
    params.group = kGroup;
    params.scale = scale_;
    params.zone = zone;
    params.out = out.data();
    params.lse = lse.data();
    EstimateScratch scratch;
    CARREL_EXPECT_OK(EstimateRest(summaries, values, params, scratch));
    for (int64_t h = 0; h < kGroup; ++h) {
      state.insert(state.end(), out.begin() + h * kDim, out.begin() + (h + 1) * kDim);
      state.push_back(lse[static_cast<size_t>(h)]);
    }
    return state;
  }

  std::mt19937_64 rng_{TestSeed()};
  const float scale_ = 1 / std::sqrt(static_cast<float>(kDim));
  KeySet keys_, values_;
  std::string blob_;
};

TEST_F(SummaryTableTest, ZonesWithinAndAcrossSegments_GiveTheTermOfTheirSummaries) {
  const Summaries summaries = Open({.spread_share = 0.3f});
  const int64_t segment = summaries.layout().segment_rows();
  std::vector<float> wide(values_.keys.size());
  Bf16ToFloat(values_.keys, wide.data());
  float largest = 0;
  for (const float x : wide) largest = std::max(largest, std::abs(x));
  for (const RowRange zone : {RowRange{0, kRows},
                              {4, kRows - 64},
                              {segment, 2 * segment},
                              {segment - 1, segment + 1},
                              {300, 500}}) {
    const auto table = MakeSummaryTable(summaries, values_.AsRows(), zone);
    CARREL_ASSERT_OK(table);
    ASSERT_EQ(static_cast<int64_t>(table->row_cluster.size()), zone.rows());
    double rows = 0;
    for (const auto& cluster : table->clusters) rows += cluster.rows;
    EXPECT_EQ(rows, static_cast<double>(zone.rows()));
    const std::vector<float> q = RandomNormal(rng_, kGroup * kDim);
    const std::vector<float> expected = OfSummaries(summaries, zone, q);
    const std::vector<float> got = OfTable(*table, q);
    for (size_t i = 0; i < got.size(); ++i) {
      // Means made anew are int8, those of EstimateRest exact rows of bf16.
      EXPECT_NEAR(got[i], expected[i], largest / 254 + 0.01)
          << "element " << i << " of " << zone.begin;
    }
  }
}

TEST_F(SummaryTableTest, HeadThatIsLeftOut_HasNoRows) {
  const auto table = MakeSummaryTable(Open({.left_out = true}), values_.AsRows(), {4, 5000});
  CARREL_ASSERT_OK(table);
  for (const auto& cluster : table->clusters) EXPECT_EQ(cluster.rows, 0);
}

TEST_F(SummaryTableTest, RowOfAClusterThatIsNotThere_IsDataLoss) {
  const Summaries whole = Open({});
  const SummaryLayout& layout = whole.layout();
  const int64_t last = layout.segments() - 1;
  blob_[static_cast<size_t>(layout.Offset(last) +
                            layout.RowClustersOffset(layout.ClustersOf(last)))] = '\xff';
  EXPECT_THAT(MakeSummaryTable(*Summaries::Open(blob_, kRows, kDim), values_.AsRows(), {0, kRows}),
              StatusIs(absl::StatusCode::kDataLoss, "cluster 255"));
}

}  // namespace
}  // namespace carrel::kvstore
