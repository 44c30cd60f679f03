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
  auto document = DocumentText::Create(*tokenizer.Encode(text), tokenizer, "");
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

TEST(DocumentTextTest, AHeadOfLetters_IsNoText) {
  const auto tokenizer = Bytes();
  const auto tokens = EncodeGivenText(*tokenizer, "U: ", "The pier is long. It creaks.");
  CARREL_ASSERT_OK(tokens);
  const auto document = DocumentText::Create(*tokens, *tokenizer, "U: ");
  CARREL_ASSERT_OK(document);
  EXPECT_EQ(document->text(), "The pier is long. It creaks.");
  EXPECT_THAT(Passages(*document), testing::ElementsAre("The pier is long. ", "It creaks."));
  // Not at the beginning: it is text.
  const auto other = DocumentText::Create(*tokenizer->Encode("A U: b."), *tokenizer, "U: ");
  CARREL_ASSERT_OK(other);
  EXPECT_EQ(other->text(), "A U: b.");
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

// <e> is a control token of the small tokenizer.
TEST(DocumentTextTest, WhatStandsBeforeTheTextIsNoPartOfIt) {
  const auto tokenizer = Bytes();
  const struct {
    const char* head;
    const char* document;
    const char* text;
    Position first;
  } cases[] = {
      {"", "<e>One is here. ", "One is here. ", 1},
      {"", "One is here. ", "One is here. ", 0},
      {"<e>user\n", "<e>user\nOne is here. ", "One is here. ", 6},
      {"<e>system be brief<e>user ", "<e>system be brief<e>user One is here. ", "One is here. ",
       22},
      // Another system message, or none, before the same role.
      {"<e>system be brief<e>user ", "<e>system go<e>user One is here. ", "One is here. ", 16},
      {"<e>system be brief<e>user ", "<e>user One is here. ", "One is here. ", 6},
      // The role is what tells the user's turn from the system's.
      {"<e>system<e>: be brief<e>user<e>: ", "<e>system<e>: no<e>user<e>: One is here. ",
       "One is here. ", 20},
      // A token across the border: " a".
      {"<e>user ", "<e>user a is here. ", "a is here. ", 5},
      {"<e>", "<e>One is here. ", "One is here. ", 1},
      // Not a turn's.
      {"<e>user ", "<e>One is here, user of it. ", "One is here, user of it. ", 1},
      {"<e>user ", "One is here<e>user who. ", "One is hereuser who. ", 0},
      {"<e>user ", "<e>user ", "", 6},
      {"<e>user ", "", "", 0},
  };
  for (const auto& c : cases) {
    const auto document = DocumentText::Create(*tokenizer->Encode(c.document), *tokenizer, c.head);
    CARREL_ASSERT_OK(document);
    EXPECT_EQ(document->text(), c.text) << c.document;
    if (document->text().empty()) {
      EXPECT_TRUE(document->passages().empty());
      continue;
    }
    EXPECT_EQ(document->passages().front().begin, c.first) << c.document;
    EXPECT_EQ(document->TextOf(document->passages().front()), c.text);
    EXPECT_EQ(document->PassageOf(c.first), 0);
    EXPECT_EQ(document->PassageOf(c.first - 1), -1);
    EXPECT_EQ(document->begin(c.first), 0);
  }
  // Written out by somebody, it is text.
  const std::string written = "<e>user One.";
  const auto as_text =
      *tokenizer->Encode(written, nullptr, {{0, static_cast<int64_t>(written.size())}});
  EXPECT_EQ(DocumentText::Create(as_text, *tokenizer, "<e>user ")->text(), written);
}

TEST(DocumentTextTest, AGivenTextStandsInTheTurnAndNamesItsOwnOffsets) {
  const auto tokenizer = Bytes();
  const std::string head = "<e>user ", text = "a <e> is written. ";
  const auto ids = EncodeGivenText(*tokenizer, head, text);
  CARREL_ASSERT_OK(ids);
  EXPECT_EQ(*tokenizer->Decode(*ids, /*skip_special=*/false), head + text);
  EXPECT_EQ(DocumentText::Create(*ids, *tokenizer, head)->text(), text);
  EXPECT_THAT(EncodeGivenText(*tokenizer, head, "abc\xff"),
              StatusIs(absl::StatusCode::kInvalidArgument, "offset 3 of 4"));
  const auto without = model::LoadFiles(
      {{"tokenizer.json", model::SmallTokenizerJson(R"({"model": {"vocab": {"Z": null}}})")}});
  CARREL_ASSERT_OK(without);
  EXPECT_THAT(EncodeGivenText(**without, head, "abcZ"),
              StatusIs(absl::StatusCode::kInvalidArgument, "offset 3"));
  model::Tokenizer::Dropped dropped;
  CARREL_EXPECT_OK(EncodeGivenText(**without, head, "abcZ", &dropped));
  EXPECT_EQ(dropped.first_offset, 3);
}

TEST(SourcesTest, WhatStandsBeforeTheTextIsNoSource) {
  const auto tokenizer = Bytes();
  const std::string head = "<e>system be brief<e>user ";
  const auto document = DocumentText::Create(
      *tokenizer->Encode(head + "Here it is said. Far from all this."), *tokenizer, head);
  CARREL_ASSERT_OK(document);
  decoder::AttendedRow sink, row;
  sink.share = 0.9f;  // position 0
  row.share = 0.1f;
  row.position = document->passages()[0].begin + 2;
  const auto sources = FindSources(*document, {sink, row}, {}, 3);
  ASSERT_EQ(sources.size(), 1u);
  EXPECT_EQ(sources[0].begin, 0);
  EXPECT_EQ(document->TextOf(sources[0].tokens), "Here it is said. ");
  EXPECT_EQ(sources[0].share, 1);
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
