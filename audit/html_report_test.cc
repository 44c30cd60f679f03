#include "audit/html_report.h"

#include <cmath>
#include <regex>

#include "audit/html_figures.h"
#include "common/test_util.h"

namespace carrel::audit {
namespace {

using testing::HasSubstr;
using testing::Not;

AuditReport SomeReport(int32_t layers, int32_t kv_heads, int steps) {
  AuditReport report{.context = "a<b>&'\"",
                     .index_kind = "code",
                     .shape = {layers, kv_heads * 4, kv_heads, 64},
                     .tokens = 30883,
                     .stored_queries = 256,
                     .small_zones = 5,
                     .positions = {700, 1700},
                     .threads = 2,
                     .seconds = 1.5};
  for (int s = 0; s < steps; ++s) {
    report.steps.push_back({.factor = std::ldexp(0.5, s), .effort = 256 << s});
  }
  for (int32_t i = 0; i < layers * kv_heads; ++i) {
    HeadAudit head{.layer = Layer(i / kv_heads), .kv_head = KvHead(i % kv_heads)};
    head.params.kind = kvstore::IndexKind::kCode;
    head.index_bytes = 30883 * 17;
    head.exact = {0.9, 0.8, 0.1, 120000, 900};
    for (int s = 0; s < steps; ++s) {
      const double recall = 1 - 0.01 * (i % 7) / (s + 1);
      head.curve.push_back({.effort = 256 << s,
                            .recall = recall,
                            .recall_least = recall - 0.1,
                            .mass = 0.89,
                            .mass_least = 0.7,
                            .output_error = 0.12,
                            .output_error_exact = 0.03,
                            .visited = 30000,
                            .visited_share = 0.25,
                            .search_us = 200});
    }
    head.judged = head.curve[static_cast<size_t>(steps / 2)];
    report.heads.push_back(head);
  }
  return report;
}

int64_t Count(const std::string& text, const std::string& what) {
  int64_t count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

TEST(HtmlReportTest, Page_IsSelfContainedAndEscaped) {
  const std::string page = HtmlReport(SomeReport(8, 2, 3));
  for (const char* outside : {"http:", "https:", "src=", "href=", "@import", "url("}) {
    EXPECT_THAT(page, Not(HasSubstr(outside)));
  }
  EXPECT_THAT(page, HasSubstr("a&lt;b&gt;&amp;&#39;&quot;"));
  EXPECT_THAT(page, Not(HasSubstr("a<b>")));
  EXPECT_THAT(page, HasSubstr("30,883 tokens"));
  for (const char* number : {">nan", ">inf", "\"nan", "\"inf", "-nan"}) {
    EXPECT_THAT(page, Not(HasSubstr(number)));
  }
}

TEST(HtmlReportTest, Page_IsWellFormed) {
  for (const auto& [layers, kv_heads, steps] :
       {std::tuple{8, 2, 3}, {32, 8, 5}, {80, 8, 2}, {2, 40, 1}, {1, 1, 1}}) {
    SCOPED_TRACE(absl::StrCat(layers, " x ", kv_heads));
    AuditReport report = SomeReport(layers, kv_heads, steps);
    report.config.want_recall = 0.99;
    report.heads[0].least = report.heads[0].judged;
    const std::string page = HtmlReport(report);
    for (const char* element : {"svg", "g", "text", "figure", "section", "table", "tr", "td", "p",
                                "div", "dl", "title"}) {
      EXPECT_EQ(Count(page, absl::StrCat("<", element, ">")) +
                    Count(page, absl::StrCat("<", element, " ")),
                Count(page, absl::StrCat("</", element, ">")))
          << element;
    }
    // A cell for each head in each of the seven maps.
    EXPECT_EQ(Count(page, "<g><title>layer "),
              7 * layers * kv_heads + (layers <= 40 ? 4 * layers * steps : 0));
  }
}

TEST(HtmlReportTest, Auto_ShowsEachHeadsKind) {
  AuditReport report = SomeReport(8, 2, 3);
  EXPECT_THAT(HtmlReport(report), Not(HasSubstr("Index kind")));
  report.index_kind = "auto";
  report.heads[3].params.kind = kvstore::IndexKind::kIvf;
  const std::string page = HtmlReport(report);
  EXPECT_THAT(page, HasSubstr("Index kind"));
  EXPECT_THAT(page, HasSubstr("1 heads ivf"));
}

TEST(HtmlFiguresTest, Values_ThatAreNotFinite_AreGrey) {
  HeatMap map{.title = "t",
              .layers = 1,
              .heads = 2,
              .values = {NAN, 1},
              .cells = {"-", "1"},
              .hovers = {"none", "one"}};
  EXPECT_THAT(HeatMapFigure(map), HasSubstr("#dbdbdb"));
  EXPECT_THAT(HeatMapFigure(map), Not(HasSubstr("nan")));
}

}  // namespace
}  // namespace carrel::audit
