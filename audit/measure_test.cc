#include "audit/measure.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <utility>

#include "audit/audit_test_util.h"
#include "common/test_util.h"

namespace carrel::audit {
namespace {

using kvstore::SearchRequest;
using kvstore::SearchResult;

std::unique_ptr<kvstore::Index> Flat(const RandomHead& head) {
  auto index = kvstore::OpenIndex({}, {}, head.KeyRows());
  CARREL_EXPECT_OK(index);
  return *std::move(index);
}

// Exact search, whose rows are then spoilt.
class CrippledIndex : public kvstore::Index {
 public:
  using Spoil = std::function<std::vector<Position>(const std::vector<Position>&, RowRange)>;
  CrippledIndex(const RandomHead& head, Spoil spoil)
      : flat_(Flat(head)), spoil_(std::move(spoil)) {}

  kvstore::IndexKind kind() const override { return kvstore::IndexKind::kHnsw; }
  int64_t resident_bytes() const override { return 0; }
  absl::Status Search(const SearchRequest& request, kvstore::SearchScratch& scratch,
                      SearchResult& result) const override {
    const absl::Status status = flat_->Search(request, scratch, result);
    result.ids = spoil_(result.ids, request.zone);
    result.scores.clear();
    result.visited = 7 * request.group;
    result.zone_scored = false;
    return status;
  }

 private:
  const std::unique_ptr<kvstore::Index> flat_;
  const Spoil spoil_;
};

// Every other row, and the first rows of the zone that are not among the best.
std::vector<Position> HalfAndWrong(const std::vector<Position>& best, RowRange zone) {
  std::vector<Position> found;
  for (size_t i = 0; i < best.size(); i += 2) found.push_back(best[i]);
  for (Position row = zone.begin; row < zone.begin + 3; ++row) {
    if (std::find(best.begin(), best.end(), row) == best.end()) found.push_back(row);
  }
  return found;
}

double PlainError(const std::vector<double>& out, const std::vector<double>& reference) {
  double error = 0, norm = 0;
  for (size_t c = 0; c < out.size(); ++c) {
    error += (out[c] - reference[c]) * (out[c] - reference[c]);
    norm += reference[c] * reference[c];
  }
  return std::sqrt(error / norm);
}

struct Case {
  int64_t tokens, head_dim, group, samples, top_k;
};

class MeasureTest : public testing::TestWithParam<Case> {
 protected:
  MeasureTest()
      : head_(MakeHead(TestSeed(), GetParam().tokens, GetParam().head_dim, GetParam().group,
                       GetParam().samples)) {
    plan_ = {.sink = 3, .local = 20, .top_k = GetParam().top_k};
    for (int64_t i = 0; i < head_.queries.samples(); ++i) {
      if (ZoneOf(i).rows() >= 4 * plan_.top_k) plan_.samples.push_back(i);
    }
  }

  RowRange ZoneOf(int64_t sample) const {
    return QueryZone(head_.queries.positions[sample], head_.tokens, plan_.sink, plan_.local);
  }
  HeadMeasure Create() const {
    auto measure = HeadMeasure::Create(head_.KeyRows(), head_.ValueRows(), head_.queries, plan_);
    CARREL_EXPECT_OK(measure);
    return *std::move(measure);
  }

  const RandomHead head_;
  QueryPlan plan_;
};

TEST_P(MeasureTest, Flat_FindsEverything) {
  HeadMeasure measure = Create();
  const auto measured = measure.Measure(*Flat(head_), 0);
  CARREL_ASSERT_OK(measured);
  EXPECT_EQ(measured->recall, 1);
  EXPECT_EQ(measured->recall_least, 1);
  EXPECT_EQ(measured->output_error_exact, 0);
  EXPECT_EQ(measured->mass, measure.exact().mass);
  EXPECT_EQ(measured->mass_least, measure.exact().mass_least);
  EXPECT_EQ(measured->output_error, measure.exact().output_error);
  EXPECT_EQ(measured->visited_share, 1);
  EXPECT_TRUE(measured->scanned);
  EXPECT_GT(measured->search_us, 0);
  EXPECT_GT(measure.exact().output_error, 0);
}

TEST_P(MeasureTest, CrippledIndex_NumbersEqualPlainLoops) {
  HeadMeasure measure = Create();
  const auto measured = measure.Measure(CrippledIndex(head_, HalfAndWrong), 77);
  CARREL_ASSERT_OK(measured);

  Measured plain{.recall_least = 1};
  ExactQuality exact;
  for (const int64_t sample : plan_.samples) {
    const PlainQuery answer = AnswerPlainly(head_, sample, ZoneOf(sample));
    const std::vector<Position> best(answer.ranked.begin(), answer.ranked.begin() + plan_.top_k);
    const std::vector<Position> found = HalfAndWrong(best, answer.zone);
    const std::set<Position> wanted(best.begin(), best.end());
    double hits = 0;
    for (const Position row : found) hits += static_cast<double>(wanted.count(row));
    plain.recall += hits / static_cast<double>(best.size());
    plain.recall_least = std::min(plain.recall_least, hits / static_cast<double>(best.size()));
    double least = 1, exact_least = 1;
    for (int64_t h = 0; h < head_.queries.group; ++h) {
      const auto mass_of = [&](const std::vector<Position>& rows) {
        double mass = 0;
        for (const Position row : rows) mass += answer.share[h][row - answer.zone.begin];
        return mass;
      };
      const auto group = static_cast<double>(head_.queries.group);
      plain.mass += mass_of(found) / group;
      exact.mass += mass_of(best) / group;
      least = std::min(least, mass_of(found));
      exact_least = std::min(exact_least, mass_of(best));
      const auto whole = AttendPlainly(head_, sample, h, answer.ranked);
      const auto of_best = AttendPlainly(head_, sample, h, best);
      const auto of_found = AttendPlainly(head_, sample, h, found);
      plain.output_error += PlainError(of_found, whole) / group;
      plain.output_error_exact += PlainError(of_found, of_best) / group;
      exact.output_error += PlainError(of_best, whole) / group;
    }
    plain.mass_least += least;
    exact.mass_least += exact_least;
    exact.visited += static_cast<double>(answer.zone.rows() * head_.queries.group);
  }
  const auto n = static_cast<double>(plan_.samples.size());
  EXPECT_EQ(measured->effort, 77);
  EXPECT_NEAR(measured->recall, plain.recall / n, 1e-9);
  EXPECT_NEAR(measured->recall_least, plain.recall_least, 1e-9);
  EXPECT_NEAR(measured->mass, plain.mass / n, 1e-5);
  EXPECT_NEAR(measured->mass_least, plain.mass_least / n, 1e-5);
  EXPECT_NEAR(measured->output_error, plain.output_error / n, 1e-4);
  EXPECT_NEAR(measured->output_error_exact, plain.output_error_exact / n, 1e-4);
  EXPECT_EQ(measured->visited, 7 * head_.queries.group);
  EXPECT_NEAR(measured->visited_share, measured->visited / (exact.visited / n), 1e-12);
  EXPECT_FALSE(measured->scanned);
  EXPECT_NEAR(measure.exact().mass, exact.mass / n, 1e-5);
  EXPECT_NEAR(measure.exact().mass_least, exact.mass_least / n, 1e-5);
  EXPECT_NEAR(measure.exact().output_error, exact.output_error / n, 1e-4);
  EXPECT_NEAR(measure.exact().visited, exact.visited / n, 1e-9);
}

TEST_P(MeasureTest, IndexThatFindsNothing_IsAllError) {
  HeadMeasure measure = Create();
  const auto nothing = [](const std::vector<Position>&, RowRange) {
    return std::vector<Position>();
  };
  const auto measured = measure.Measure(CrippledIndex(head_, nothing), 1);
  CARREL_ASSERT_OK(measured);
  EXPECT_EQ(measured->recall, 0);
  EXPECT_EQ(measured->mass, 0);
  EXPECT_NEAR(measured->output_error, 1, 1e-6);
  EXPECT_NEAR(measured->output_error_exact, 1, 1e-6);
}

TEST_P(MeasureTest, IndexThatInventsRows_IsRefused) {
  HeadMeasure measure = Create();
  const auto twice = [](std::vector<Position> best, RowRange) {
    best.back() = best.front();
    return best;
  };
  const auto outside = [](std::vector<Position> best, RowRange zone) {
    best.back() = zone.end;
    return best;
  };
  if (plan_.top_k > 1) {
    EXPECT_THAT(measure.Measure(CrippledIndex(head_, twice), 1),
                StatusIs(absl::StatusCode::kInternal, "twice"));
  }
  EXPECT_THAT(measure.Measure(CrippledIndex(head_, outside), 1),
              StatusIs(absl::StatusCode::kInternal, "outside the zone"));
}

INSTANTIATE_TEST_SUITE_P(Shapes, MeasureTest,
                         testing::Values(Case{600, 24, 3, 12, 16}, Case{301, 33, 1, 5, 1},
                                         Case{900, 64, 8, 9, 50}));

TEST(QueryZoneTest, QueriesSeeWhatCameBefore_WithoutSinkAndLocal) {
  EXPECT_EQ(QueryZone(50, 100, 4, 20), (RowRange{4, 50}));
  EXPECT_EQ(QueryZone(99, 100, 4, 20), (RowRange{4, 80}));
  EXPECT_EQ(QueryZone(80, 100, 0, 0), (RowRange{0, 80}));
  EXPECT_EQ(QueryZone(3, 100, 4, 20), (RowRange{4, 4}));
  EXPECT_EQ(QueryZone(99, 100, 60, 60), (RowRange{60, 60}));
}

}  // namespace
}  // namespace carrel::audit
