#include "library/document_text.h"

#include "common/test_random.h"
#include "common/test_util.h"
#include "library/sources.h"
#include "model/tokenizer/tokenizer_test_util.h"

namespace carrel::library {
namespace {

// Of bytes, with a few longer tokens.
std::unique_ptr<model::Tokenizer> Bytes() {
  auto tokenizer = model::LoadFiles({{"tokenizer.json", model::SmallTokenizerJson()}});
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

DocumentText Of(const model::Tokenizer& tokenizer, const std::string& text) {
  auto document = DocumentText::Create(*tokenizer.Encode(text), tokenizer);
  EXPECT_TRUE(document.ok()) << document.status();
  return *std::move(document);
}

std::vector<std::string> Passages(const DocumentText& document) {
  std::vector<std::string> texts;
  for (const RowRange& passage : document.passages()) texts.push_back(document.TextOf(passage));
  return texts;
}

TEST(DocumentTextTest, SentencesArePassages) {
  const auto tokenizer = Bytes();
  EXPECT_THAT(
      Passages(
          Of(*tokenizer,
             "The first ends here. \"The second asks something?\" The third names e.g. that of Mr. "
             "Darcy!\n\nBehind an empty line\nwith 3.14 in it. and goes on.")),
      testing::ElementsAre("The first ends here. ", "\"The second asks something?\" ",
                           "The third names e.g. that of Mr. ",
                           "Darcy!\n\nBehind an empty line\nwith "
                           "3.14 in it. and goes on."));
}

TEST(DocumentTextTest, WhateverTheText_PassagesCoverIt_AndAreNotLong) {
  const auto tokenizer = Bytes();
  std::mt19937_64 rng(TestSeed());
  for (int trial = 0; trial < 50; ++trial) {
    std::string text = model::RandomUtf8(rng, 1 + static_cast<int64_t>(rng() % 300));
    for (uint64_t i = rng() % 20; i > 0; --i) text.insert(rng() % (text.size() + 1), ". A");
    const auto ids = tokenizer->Encode(text);
    if (!ids.ok()) continue;  // what was inserted cut a character
    const DocumentText document = Of(*tokenizer, text);
    EXPECT_EQ(document.text(), *tokenizer->Decode(*ids, /*skip_special=*/true));
    Position at = 0;
    std::string joined;
    for (size_t i = 0; i < document.passages().size(); ++i) {
      const RowRange& passage = document.passages()[i];
      ASSERT_EQ(passage.begin, at);
      ASSERT_GT(passage.rows(), 0);
      EXPECT_LE(passage.rows(), DocumentText::kPassageTokens);
      EXPECT_EQ(document.PassageOf(passage.begin), static_cast<int64_t>(i));
      EXPECT_EQ(document.PassageOf(passage.end - 1), static_cast<int64_t>(i));
      joined += document.TextOf(passage);
      at = passage.end;
    }
    EXPECT_EQ(at, static_cast<Position>(ids->size()));
    EXPECT_EQ(joined, document.text());
  }
}

TEST(SourcesTest, PassagesWeighWhatTheirRowsCount_NeighboursAreOne) {
  const auto tokenizer = Bytes();
  const DocumentText document = Of(*tokenizer,
                                   "Of this nobody spoke. Here is what was said: x. And this is "
                                   "beside it: y. Far from all this.");
  ASSERT_EQ(document.passages().size(), 4u);
  const auto row = [&](int64_t passage, float share, int32_t step = 0) {
    decoder::AttendedRow attended;
    attended.position = document.passages()[static_cast<size_t>(passage)].begin + 3;
    attended.share = share;
    attended.step = step;
    return attended;
  };
  // Much on one row outweighs the same in small parts.
  std::vector<decoder::AttendedRow> rows = {row(0, 0.6f), row(3, 0.9f)};
  for (int i = 0; i < 12; ++i) rows.push_back(row(1, 0.1f));
  auto sources = FindSources(document, rows, {}, 2);
  ASSERT_EQ(sources.size(), 2u);
  EXPECT_EQ(sources[0].tokens, document.passages()[3]);
  EXPECT_NEAR(sources[0].share, 0.81 / (0.81 + 0.36 + 0.12), 1e-5);
  EXPECT_EQ(document.text().substr(sources[0].begin, sources[0].end - sources[0].begin),
            "Far from all this.");
  EXPECT_EQ(sources[1].tokens, document.passages()[0]);
  // A row that holds the token that was said next counts more.
  const TokenId said = document.tokens()[static_cast<size_t>(rows[0].position)];
  sources = FindSources(document, rows, {said}, 1);
  ASSERT_EQ(sources.size(), 1u);
  EXPECT_EQ(sources[0].tokens, document.passages()[0]);
  // Neighbours are one source; what weighs next to nothing is none.
  sources = FindSources(document, {row(1, 0.5f), row(2, 0.4f), row(0, 0.01f)}, {}, 3);
  ASSERT_EQ(sources.size(), 1u);
  EXPECT_EQ(sources[0].tokens,
            (RowRange{document.passages()[1].begin, document.passages()[2].end}));
  EXPECT_TRUE(FindSources(document, {}, {}, 3).empty());
}

}  // namespace
}  // namespace carrel::library
