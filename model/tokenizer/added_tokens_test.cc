#include "model/tokenizer/added_tokens.h"

#include "common/test_util.h"

namespace carrel::model {
namespace {

using testing::ElementsAre;

// Spans as "id:text", plain ones as "text".
std::vector<std::string> Split(const std::vector<AddedToken>& tokens, const std::string& text) {
  std::vector<TextSpan> spans;
  AddedTokenMatcher(tokens).Split(text, &spans);
  std::vector<std::string> result;
  for (const TextSpan& span : spans) {
    result.push_back(span.id < 0 ? std::string(span.text) : absl::StrCat(span.id, ":", span.text));
  }
  return result;
}

TEST(AddedTokens, Split_Overlapping_TakesLeftmostLongest) {
  const std::vector<AddedToken> tokens = {
      {.content = "<a>", .id = 1}, {.content = "<a><b>", .id = 2}, {.content = "b><", .id = 3}};
  EXPECT_THAT(Split(tokens, "x<a><b><a>y<<a"), ElementsAre("x", "2:<a><b>", "1:<a>", "y<<a"));
  EXPECT_THAT(Split(tokens, "<a><c>"), ElementsAre("1:<a>", "<c>"));
  EXPECT_THAT(Split(tokens, ""), ElementsAre());
  EXPECT_THAT(Split({}, "x"), ElementsAre("x"));
}

TEST(AddedTokens, Split_EmptyContent_IsNeverMatched) {
  EXPECT_THAT(Split({{.content = "", .id = 1}}, "ab"), ElementsAre("ab"));
}

TEST(AddedTokens, Split_Strip_TakesWhiteSpaceIn) {
  const AddedToken left = {.content = "<l>", .id = 1, .lstrip = true};
  const AddedToken right = {.content = "<r>", .id = 2, .rstrip = true};
  EXPECT_THAT(Split({left, right}, "a \u00A0\n<l> b <r> \tc"),
              ElementsAre("a", "1: \u00A0\n<l>", " b ", "2:<r> \t", "c"));
  // What the first took is gone for the second.
  EXPECT_THAT(Split({left, right}, "<r>  <l>"), ElementsAre("2:<r>  ", "1:<l>"));
}

TEST(AddedTokens, Split_SingleWord_NeedsNonWordNeighbours) {
  const std::vector<AddedToken> tokens = {{.content = "foo", .id = 1, .single_word = true}};
  EXPECT_THAT(Split(tokens, "foo, foo!"), ElementsAre("1:foo", ", ", "1:foo", "!"));
  EXPECT_THAT(Split(tokens, "food \u00E9foo foo_"), ElementsAre("food \u00E9foo foo_"));
}

TEST(AddedTokens, Merge_NewAndChanged_AreListed) {
  std::vector<AddedToken> tokens = {{.content = "<a>", .id = 1}, {.content = "<b>", .id = 2}};
  std::string changes;
  CARREL_ASSERT_OK(MergeAddedTokens("f",
                                    {{.content = "<a>", .id = 1},
                                     {.content = "<b>", .id = 2, .special = true},
                                     {.content = "<c>", .id = 9}},
                                    &tokens, &changes));
  EXPECT_THAT(tokens, ElementsAre(AddedToken{.content = "<a>", .id = 1},
                                  AddedToken{.content = "<b>", .id = 2, .special = true},
                                  AddedToken{.content = "<c>", .id = 9}));
  EXPECT_EQ(changes, "\n2 10000 <b>\n9 00000 <c>");
}

TEST(AddedTokens, Merge_Contradiction_IsRefused) {
  std::vector<AddedToken> tokens = {{.content = "<a>", .id = 1}};
  std::string changes;
  EXPECT_THAT(
      MergeAddedTokens("f", {{.content = "<a>", .id = 2}}, &tokens, &changes),
      StatusIs(absl::StatusCode::kInvalidArgument, "\"<a>\" has id 2 here and 1 elsewhere"));
  EXPECT_THAT(MergeAddedTokens("f", {{.content = "<b>", .id = 1}}, &tokens, &changes),
              StatusIs(absl::StatusCode::kInvalidArgument, "id 1 is the added token \"<b>\""));
}

}  // namespace
}  // namespace carrel::model
