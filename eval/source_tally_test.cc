#include "eval/source_tally.h"

#include "common/test_util.h"
#include "model/tokenizer/tokenizer_test_util.h"

namespace carrel::eval {
namespace {

using library::DocumentText;

DocumentText Document(const std::string& text) {
  const auto tokenizer = *model::LoadFiles({{"tokenizer.json", model::SmallTokenizerJson()}});
  return *DocumentText::Create(*tokenizer->Encode(text), *tokenizer, "");
}

constexpr char kText[] =
    "Emily Russell was born in Naples. A spare key of the Forest brewery is kept in Naples. "
    "A spare key of the Copper archive is in Odessa. It may rain in Odessa tomorrow. "
    "A spare key of the Copper archive is in Beirut. ";

TEST(FactPassagesTest, AFactStandsWhereThePartIs_BesideTheQuestionsWords) {
  const DocumentText document = Document(kText);
  ASSERT_EQ(document.passages().size(), 5u);
  EXPECT_THAT(FactPassages(document, "Where was Emily Russell born?", "Naples"),
              testing::ElementsAre(testing::ElementsAre(0)));
  EXPECT_THAT(FactPassages(document, "Where are the spare keys of the Copper archive?",
                           "Odessa, Beirut, Rome"),
              testing::ElementsAre(testing::ElementsAre(2), testing::ElementsAre(4)));
  EXPECT_TRUE(FactPassages(document, "Where?", "Naple").empty());  // whole words alone
}

TEST(SourceTallyTest, CountsAnswersWithAFactAmongTheirSources) {
  const DocumentText document = Document(kText);
  const auto source = [&](int64_t passage) {
    const RowRange rows = document.passages()[static_cast<size_t>(passage)];
    return serving::AnswerSource{.first_token = rows.begin, .end_token = rows.end};
  };
  SourceTally tally;
  const std::string born = "Where was Emily Russell born?",
                    keys = "Which spare keys of the Copper archive?";
  tally.Add(document, born, "Naples", {source(3), source(0)}, 2);
  tally.Add(document, born, "Naples", {source(1), source(2)}, 2);  // Naples, but another fact
  tally.Add(document, keys, "Odessa, Beirut", {source(4), source(3)}, 2);
  tally.Add(document, keys, "Odessa, Beirut", {source(4), source(2)}, 2);
  tally.Add(document, keys, "Paris", {source(4)}, 2);  // nobody can find that
  EXPECT_EQ(tally.asked, 4);
  EXPECT_EQ(tally.with_fact, 3);
  EXPECT_EQ(tally.with_every, 2);
  EXPECT_THAT(tally.missed, testing::ElementsAre(born));
}

}  // namespace
}  // namespace carrel::eval
