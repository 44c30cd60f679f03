#include "common/metrics.h"

#include <algorithm>

#include "common/test_util.h"

namespace carrel {
namespace {

const MetricFamily* Find(const std::vector<MetricFamily>& families, const std::string& name) {
  const auto it = std::find_if(families.begin(), families.end(),
                               [&](const MetricFamily& family) { return family.name == name; });
  return it == families.end() ? nullptr : &*it;
}

TEST(MetricsTest, SameNameAndLabels_AreTheSameCounter) {
  Counter& a = CounterOf("carrel_test_things_total", "Things.", {{"kind", "a"}});
  a.Add(2);
  CounterOf("carrel_test_things_total", "Something else.", {{"kind", "a"}}).Add();
  CounterOf("carrel_test_things_total", "Things.", {{"kind", "b"}}).Add(5);
  EXPECT_EQ(a.value(), 3);
  const std::vector<MetricFamily> families = SnapshotMetrics();
  const MetricFamily* family = Find(families, "carrel_test_things_total");
  ASSERT_NE(family, nullptr);
  EXPECT_EQ(family->help, "Things.");
  EXPECT_EQ(family->type, MetricType::kCounter);
  ASSERT_EQ(family->samples.size(), 2u);
  EXPECT_EQ(family->samples[0].value, 3);
  EXPECT_EQ(family->samples[1].value, 5);
}

TEST(MetricsTest, MoreLabelSetsThanTheLimit_AreCountedTogether) {
  for (int i = 0; i < kMaxSeries + 50; ++i) {
    CounterOf("carrel_test_many_total", "Many.", {{"name", std::to_string(i)}}).Add();
  }
  const std::vector<MetricFamily> families = SnapshotMetrics();
  const MetricFamily* family = Find(families, "carrel_test_many_total");
  ASSERT_NE(family, nullptr);
  EXPECT_EQ(family->samples.size(), static_cast<size_t>(kMaxSeries) + 1);
  double total = 0, other = 0;
  for (const MetricSample& sample : family->samples) {
    total += sample.value;
    if (sample.labels[0].second == "other") other = sample.value;
  }
  EXPECT_EQ(total, kMaxSeries + 50);
  EXPECT_EQ(other, 50);
}

TEST(MetricsTest, Buckets_CountWhatIsAtMostTheirBound) {
  Histogram& histogram = HistogramOf("carrel_test_seconds", "Seconds.");
  for (const double us : {0.5, 3.0, 60.0, 1e3, 5e6, 1e9}) histogram.Add(us);
  const Histogram::Buckets buckets = histogram.Snapshot();
  EXPECT_EQ(buckets.count, 6);
  EXPECT_NEAR(buckets.sum_us, 1005001063.5, 1);
  ASSERT_EQ(buckets.cumulative.size(), Histogram::Bounds().size());
  for (size_t i = 0; i < buckets.cumulative.size(); ++i) {
    int64_t expected = 0;
    for (const double us : {0.5, 3.0, 60.0, 1e3, 5e6, 1e9})
      expected += us <= Histogram::Bounds()[i];
    EXPECT_EQ(buckets.cumulative[i], expected) << "<= " << Histogram::Bounds()[i] << " us";
  }
}

}  // namespace
}  // namespace carrel
