#include "audit/audit.h"

#include <cmath>

#include "audit/audit_test_util.h"
#include "audit/efforts.h"
#include "audit/summary.h"
#include "common/progress.h"
#include "common/test_util.h"
#include "common/thread_pool.h"
#include "kvstore/storage/store.h"

namespace carrel::audit {
namespace {

using absl::StatusCode;
using kvstore::IndexKind;

absl::StatusOr<AuditReport> Audit(const kvstore::StoredContext& context, const AuditConfig& config,
                                  int threads = 2) {
  ThreadPool pool(threads - 1);
  Progress progress(Progress::Mode::kQuiet);
  return RunAudit(context, config, &pool, progress);
}

std::shared_ptr<const kvstore::StoredContext> Publish(const RandomContextSpec& spec,
                                                      std::vector<RandomHead>* heads = nullptr) {
  auto context = PublishContext(spec, FreshTempDir(), heads);
  CARREL_EXPECT_OK(context);
  return *std::move(context);
}

TEST(AuditTest, Flat_IsExactInEveryHead) {
  RandomContextSpec spec;
  const auto context = Publish(spec);
  const auto report = Audit(*context, {.top_k = 32, .want_recall = 1});
  CARREL_ASSERT_OK(report);
  EXPECT_EQ(report->index_kind, "flat");
  ASSERT_EQ(report->heads.size(), 4u);
  for (const HeadAudit& head : report->heads) {
    EXPECT_EQ(head.judged.recall, 1);
    EXPECT_EQ(head.judged.output_error_exact, 0);
    EXPECT_EQ(head.judged.mass, head.exact.mass);
    EXPECT_EQ(head.judged.visited_share, 1);
    ASSERT_TRUE(head.least.has_value());
    EXPECT_EQ(head.least->effort, 0);
  }
  ASSERT_EQ(report->steps.size(), 1u);  // nothing to choose
  const std::vector<CurvePoint> curve = Curve(*report, report->heads);
  EXPECT_EQ(curve[0].label, "");
  EXPECT_TRUE(curve[0].judged);
  EXPECT_TRUE(HeadsBelow(*report).empty());
  EXPECT_EQ(IndexBytesPerKey(*report), 0);
}

TEST(AuditTest, Hnsw_RecallRisesAlongTheLadderAndIsReproducible) {
  RandomContextSpec spec{.tokens = 3000,
                         .indexes = {{.kind = IndexKind::kHnsw, .m = 4, .ef_construction = 16}}};
  const auto context = Publish(spec);
  const auto report = Audit(*context, {.top_k = 8, .want_recall = 0.9});
  CARREL_ASSERT_OK(report);
  ASSERT_GE(report->steps.size(), 3u);
  const std::vector<CurvePoint> curve = Curve(*report, report->heads);
  EXPECT_LT(curve.front().recall, curve.back().recall + 1e-9);
  EXPECT_LT(curve.front().visited, curve.back().visited);
  EXPECT_GT(IndexBytesPerKey(*report), 16);
  int judged = 0;
  for (size_t s = 0; s < curve.size(); ++s) {
    judged += curve[s].judged;
    EXPECT_EQ(report->steps[s].effort * 1.0, 128 * report->steps[s].factor);
  }
  EXPECT_EQ(judged, 1);
  const auto again = Audit(*context, {.top_k = 8, .want_recall = 0.9}, 1);
  CARREL_ASSERT_OK(again);
  for (size_t i = 0; i < report->heads.size(); ++i) {
    const HeadAudit& head = report->heads[i];
    EXPECT_EQ(head.judged.recall, again->heads[i].judged.recall);
    EXPECT_EQ(head.judged.output_error, again->heads[i].judged.output_error);
    ASSERT_TRUE(head.least.has_value());
    EXPECT_GE(head.least->recall, 0.9);
    EXPECT_EQ(head.least->effort, again->heads[i].least->effort);
  }
}

TEST(AuditTest, Auto_EveryHeadIsAuditedAsItsOwnKind) {
  RandomContextSpec spec{.tokens = 4000,
                         .indexes = {{.kind = IndexKind::kFlat},
                                     {.kind = IndexKind::kCode, .effort = 64},
                                     {.kind = IndexKind::kHnsw},
                                     {.kind = IndexKind::kCode}}};
  const auto report = Audit(*Publish(spec), {.top_k = 16});
  CARREL_ASSERT_OK(report);
  EXPECT_EQ(report->index_kind, "auto");
  EXPECT_EQ(report->heads[0].judged.effort, 0);
  EXPECT_EQ(report->heads[1].judged.effort, 64);
  EXPECT_EQ(report->heads[2].judged.effort, 128);
  EXPECT_EQ(report->heads[3].judged.effort, 512);
  EXPECT_EQ(report->heads[0].index_bytes, 0);
  EXPECT_GT(report->heads[3].index_bytes, 4000 * 16);
  EXPECT_EQ(DescribeIndexes(*report), "auto: 2 heads code, 1 heads flat, 1 heads hnsw");
  for (const CurvePoint& point : Curve(*report, report->heads)) EXPECT_EQ(point.label[0], 'x');
}

TEST(AuditTest, Efforts_TheFirstIsJudgedAndAllAreMeasured) {
  RandomContextSpec spec{.shape = {.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 32},
                         .tokens = 7000,
                         .indexes = {{.kind = IndexKind::kCode}}};
  const auto report = Audit(*Publish(spec), {.top_k = 16, .efforts = {200, 50, 200}});
  CARREL_ASSERT_OK(report);
  ASSERT_EQ(report->steps.size(), 2u);
  EXPECT_EQ(report->steps[0].effort, 50);
  EXPECT_EQ(report->steps[1].effort, 200);
  EXPECT_EQ(report->heads[0].judged.effort, 200);
  EXPECT_LT(report->heads[0].curve[0].visited, report->heads[0].curve[1].visited);
}

TEST(AuditTest, Queries_AreThoseThatSeeEnough_EvenlySpread) {
  RandomContextSpec spec;  // 40 queries, one every 37.5 tokens
  const auto context = Publish(spec);
  const AuditConfig config{.top_k = 50, .sample = 6, .sink = 10, .local = 100};
  const auto report = Audit(*context, config);
  CARREL_ASSERT_OK(report);
  EXPECT_EQ(report->stored_queries, 40);
  EXPECT_EQ(report->small_zones, 6);  // positions below 10 + 200
  EXPECT_EQ(report->positions.size(), 6u);
  EXPECT_GE(report->positions.front(), 210);
  for (size_t i = 1; i < 6; ++i) {
    EXPECT_NEAR(report->positions[i] - report->positions[i - 1], 34 * 37.5 / 6, 38);
  }
  const auto all = Audit(*context, {.top_k = 50});
  CARREL_ASSERT_OK(all);
  EXPECT_EQ(all->positions.size(), 32u);
}

TEST(AuditTest, BadConfigs_AreRefusedByName) {
  RandomContextSpec spec{.tokens = 600, .samples = 10};
  const auto context = Publish(spec);
  const struct {
    AuditConfig config;
    StatusCode code;
    const char* message;
  } cases[] = {
      {{.top_k = 0}, StatusCode::kInvalidArgument, "top_k=0 is outside [1, 65536]"},
      {{.top_k = 65537}, StatusCode::kInvalidArgument, "top_k=65537"},
      {{.sample = 0}, StatusCode::kInvalidArgument, "sample=0"},
      {{.sample = 11}, StatusCode::kInvalidArgument, "sample=11 exceeds the 10 queries"},
      {{.sink = -1}, StatusCode::kInvalidArgument, "sink=-1"},
      {{.local = -2}, StatusCode::kInvalidArgument, "local=-2"},
      {{.efforts = {5, 0}}, StatusCode::kInvalidArgument, "effort=0 is outside [1, 65536]"},
      {{.want_recall = 0}, StatusCode::kInvalidArgument, "want_recall=0 is outside (0, 1]"},
      {{.want_recall = 1.5}, StatusCode::kInvalidArgument, "want_recall=1.5"},
      {{.want_recall = NAN}, StatusCode::kInvalidArgument, "want_recall=nan"},
      {{.top_k = 200}, StatusCode::kFailedPrecondition, "has a zone of 800 rows"},
      {{.sink = 600}, StatusCode::kFailedPrecondition, "zone"},
  };
  for (const auto& c : cases) EXPECT_THAT(Audit(*context, c.config), StatusIs(c.code, c.message));
}

TEST(AuditTest, WithoutSampledQueries_IsRefusedByName) {
  RandomContextSpec spec{.samples = 0};
  EXPECT_THAT(Audit(*Publish(spec), {}),
              StatusIs(StatusCode::kFailedPrecondition, "no sampled queries"));
  EXPECT_THAT(Audit(*Publish(spec), {}), StatusIs(StatusCode::kFailedPrecondition, "report"));
}

// Effort 0 of a search and OwnEffort must not drift apart.
TEST(EffortsTest, OwnEffort_IsWhatEffortZeroDoes) {
  const RandomHead head = MakeHead(TestSeed(), 6000, 32, 2, 4);
  for (const IndexKind kind : kvstore::kAllIndexKinds) {
    for (const int32_t own : {0, 40}) {
      kvstore::IndexParams params{.kind = kind, .effort = own};
      const auto blob = kvstore::BuildIndex(params, head.KeyRows(), &head.queries);
      if (blob.status().code() == StatusCode::kUnimplemented) continue;
      CARREL_ASSERT_OK(blob);
      const auto index = kvstore::OpenIndex(params, *blob, head.KeyRows());
      CARREL_ASSERT_OK(index);
      for (const int64_t top_k : {10, 150}) {
        kvstore::SearchScratch scratch;
        kvstore::SearchRequest request{.queries = head.queries.Query(3, 0),
                                       .group = 2,
                                       .scale = 0.2f,
                                       .zone = {0, 6000},
                                       .top_k = top_k};
        kvstore::SearchResult by_default, by_number;
        CARREL_ASSERT_OK((*index)->Search(request, scratch, by_default));
        request.effort = OwnEffort(params, top_k, 6000);
        CARREL_ASSERT_OK((*index)->Search(request, scratch, by_number));
        EXPECT_EQ(by_default.visited, by_number.visited)
            << kvstore::IndexKindName(kind) << " effort " << own << " top_k " << top_k;
        EXPECT_EQ(by_default.ids, by_number.ids);
        EXPECT_EQ(request.effort == 0, !HasEffort(kind));
      }
    }
  }
}

TEST(EffortsTest, Ladder_IsPowersOfTwoInsideTheBounds) {
  EXPECT_EQ(Ladder({.kind = IndexKind::kIvf}, 128, 1000),
            (std::vector<int32_t>{8, 16, 32, 64, 128, 256, 512}));
  EXPECT_EQ(Ladder({.kind = IndexKind::kCode}, 128, 1000),
            (std::vector<int32_t>{128, 128, 256, 512, 1024, 2048, 4096}));
  EXPECT_EQ(Ladder({.kind = IndexKind::kGraph, .effort = 60000}, 100, 1000),
            (std::vector<int32_t>{7500, 15000, 30000, 60000, 65536, 65536, 65536}));
  EXPECT_EQ(Ladder({.kind = IndexKind::kFlat}, 128, 1000), std::vector<int32_t>(7, 0));
}

}  // namespace
}  // namespace carrel::audit
