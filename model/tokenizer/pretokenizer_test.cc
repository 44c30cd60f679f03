#include "model/tokenizer/pretokenizer.h"

#include "common/test_util.h"

namespace carrel::model {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Kind = PretokenStep::Kind;

std::vector<std::string> Split(const std::vector<PretokenStep>& steps, const std::string& text) {
  const auto pretokenizer = Pretokenizer::Create(steps);
  if (!pretokenizer.ok()) return {pretokenizer.status().ToString()};
  std::deque<std::string> owned;
  std::vector<absl::string_view> pieces;
  const absl::Status status = pretokenizer->Split(text, /*at_start=*/true, &owned, &pieces);
  if (!status.ok()) return {status.ToString()};
  return {pieces.begin(), pieces.end()};
}

TEST(Pretokenizer, Gpt2Pattern_Text_SplitsAsGpt2) {
  const std::vector<PretokenStep> gpt2 = {{.pattern = kGpt2Pattern}};
  EXPECT_THAT(
      Split(gpt2, "I'll go  to\n\n12 caf\u00E9s!? \n"),
      ElementsAre("I", "'ll", " go", " ", " to", "\n", "\n", "12", " caf\u00E9s", "!?", " \n"));
  EXPECT_THAT(Split(gpt2, ""), ElementsAre());
}

TEST(Pretokenizer, TekkenPattern_Text_SplitsAtCaseAndDigits) {
  const std::string pattern =
      R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
      R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|)"
      R"(\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  EXPECT_THAT(Split({{.pattern = pattern}}, "HelloWorld fooBAR 42 //\n"),
              ElementsAre("Hello", "World", " foo", "BAR", " ", "4", "2", " //\n"));
}

TEST(Pretokenizer, Gpt2Pattern_PrefixSpace_IsPutBeforeFirstPiece) {
  const std::vector<PretokenStep> steps = {{.kind = Kind::kPrefixSpace}, {.pattern = kGpt2Pattern}};
  EXPECT_THAT(Split(steps, "a b"), ElementsAre(" a", " b"));
  EXPECT_THAT(Split(steps, " a"), ElementsAre(" a"));
}

TEST(Pretokenizer, Split_EveryBehavior_TreatsMatchesAsNamed) {
  const auto split = [](SplitBehavior behavior, bool invert = false) {
    return Split({{.pattern = "-", .behavior = behavior, .invert = invert}}, "-a--b-c");
  };
  EXPECT_THAT(split(SplitBehavior::kRemoved), ElementsAre("a", "b", "c"));
  EXPECT_THAT(split(SplitBehavior::kRemoved, true), ElementsAre("-", "-", "-", "-"));
  EXPECT_THAT(split(SplitBehavior::kIsolated), ElementsAre("-", "a", "-", "-", "b", "-", "c"));
  EXPECT_THAT(split(SplitBehavior::kMergedWithPrevious), ElementsAre("-", "a-", "-", "b-", "c"));
  EXPECT_THAT(split(SplitBehavior::kMergedWithNext), ElementsAre("-a", "-", "-b", "-c"));
  EXPECT_THAT(split(SplitBehavior::kContiguous), ElementsAre("-", "a", "--", "b", "-", "c"));
  EXPECT_THAT(split(SplitBehavior::kContiguous, true), ElementsAre("-", "a", "--", "b", "-", "c"));
}

TEST(Pretokenizer, Split_LiteralPattern_IsNotAnExpression) {
  EXPECT_THAT(Split({{.pattern = "a.(", .literal = true}}, "xa.(abc"),
              ElementsAre("x", "a.(", "abc"));
}

TEST(Pretokenizer, Split_TwoSteps_SecondSeesEachPieceAlone) {
  // The look-behind of the second step must not see the first step's other pieces.
  EXPECT_THAT(Split({{.pattern = "x"}, {.pattern = "(?<=x)b"}}, "xbc"), ElementsAre("x", "bc"));
  EXPECT_THAT(Split({{.pattern = "\\p{N}"}, {.pattern = "\\p{L}+"}}, "ab12c"),
              ElementsAre("ab", "1", "2", "c"));
}

TEST(Pretokenizer, Split_EmptyMatches_CutBetweenCharacters) {
  EXPECT_THAT(Split({{.pattern = "(?=\u00E9)"}}, "a\u00E9\u00E9b"),
              ElementsAre("a", "\u00E9", "\u00E9b"));
}

TEST(Pretokenizer, Split_LongRuns_AreSplitWhole) {
  const std::string spaces(200000, ' ');
  EXPECT_THAT(Split({{.pattern = kGpt2Pattern}}, spaces + "x"),
              ElementsAre(spaces.substr(1), " x"));
  const std::string letters(200000, 'a');
  EXPECT_THAT(Split({{.pattern = "(?:a|b)+"}}, letters), ElementsAre(letters));
}

TEST(SplitPattern, WhiteSpace_MongolianVowelSeparator_IsNone) {
  EXPECT_THAT(Split({{.pattern = "\\s+"}}, "a\u180Eb\u2003c\u0085d"),
              ElementsAre("a\u180Eb", "\u2003", "c", "\u0085", "d"));
  EXPECT_THAT(Split({{.pattern = "[^\\s]+"}}, "\u180E\u3000"), ElementsAre("\u180E", "\u3000"));
}

TEST(SplitPattern, Translate_KnownPatterns_ChangeOnlyEscapes) {
  EXPECT_EQ(
      *TranslateOniguruma("(?i:'s)|[^\\r\\n\\p{L}]?\\p{N}{1,3}|\\s+(?!\\S)| ?[\\[\\]/]++"),
      "(?i:'s)|[^\\r\\n\\p{L}]?\\p{N}{1,3}|\\p{White_Space}+(?!\\P{White_Space})| ?[\\[\\]/]++");
  EXPECT_EQ(*TranslateOniguruma("\\u00e9\\x41\\x{1F600}{"), "\\x{00e9}\\x{41}\\x{1F600}{");
}

TEST(SplitPattern, Translate_ReadDifferently_IsRefusedByName) {
  for (const auto& [pattern, name] :
       std::vector<std::pair<std::string, std::string>>{{"^a", "anchor ^"},
                                                        {"a$", "anchor $"},
                                                        {"\\w+", "\\w"},
                                                        {"\\bx", "\\b"},
                                                        {"\\h", "\\h"},
                                                        {"(a)\\1", "\\1"},
                                                        {"(?i)a", "group (?i)"},
                                                        {"(?m:.)", "group (?m:"},
                                                        {"(*UTF)a", "(*"},
                                                        {"a{1,3}+", "{n,m}+"},
                                                        {"a{,3}", "{,n}"},
                                                        {"[a[bc]]", "nested character class"},
                                                        {"[[:alpha:]]", "nested character class"},
                                                        {"[a-z&&b]", "class intersection"},
                                                        {"[]a]", "begins with ]"},
                                                        {"[ab", "unterminated"},
                                                        {"\\xC3\\xA9", "\\xHH above 7F"},
                                                        {"\\u12", "hexadecimal"},
                                                        {"\\", "backslash"}}) {
    const auto translated = TranslateOniguruma(pattern);
    EXPECT_THAT(translated, StatusIs(absl::StatusCode::kUnimplemented, name)) << pattern;
  }
}

TEST(SplitPattern, Compile_UnknownToPcre2_IsRefused) {
  EXPECT_THAT(SplitPattern::CompileRegex("\\p{NoSuchProperty}").status(),
              StatusIs(absl::StatusCode::kUnimplemented, "NoSuchProperty"));
  EXPECT_THAT(SplitPattern::CompileRegex("(a").status(),
              StatusIs(absl::StatusCode::kUnimplemented, "PCRE2 at offset"));
}

// A pattern that explodes ends in an error, not in a hang.
TEST(SplitPattern, FindMatches_ExponentialPattern_GivesUp) {
  const auto pattern = SplitPattern::CompileRegex("(?:a|a)+\\p{N}");
  CARREL_ASSERT_OK(pattern);
  std::vector<SplitPattern::Match> matches;
  EXPECT_THAT(pattern->FindMatches(std::string(60, 'a'), &matches),
              StatusIs(absl::StatusCode::kResourceExhausted, "match limit"));
}

}  // namespace
}  // namespace carrel::model
