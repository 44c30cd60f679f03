// Each rule fails on a small tree that breaks it, and holds on the same tree without the fault.
#include "tests/tidy/rules.h"

#include <filesystem>
#include <initializer_list>
#include <utility>

#include "common/file.h"
#include "common/test_util.h"

namespace carrel::tidy {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

using Files = std::initializer_list<std::pair<std::string, std::string>>;

// A made-up repository.
Tree Make(Files files) {
  const std::string root = FreshTempDir();
  for (const auto& [path, text] : files) {
    const std::filesystem::path at = std::filesystem::path(root) / path;
    std::filesystem::create_directories(at.parent_path());
    CARREL_EXPECT_OK(WriteFileAtomically(at.string(), text));
  }
  return ReadTree(root);
}

std::string Lines(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += "  Work();\n";
  return text;
}

TEST(TreeTest, WhatIsBuiltOrHidden_IsLeftOut) {
  const Tree tree = Make({{"a.cc", "\n"},
                          {"build/b.cc", "\n"},
                          {".git/c.cc", "\n"},
                          {".ci/run", "#!/bin/sh\n"},
                          {"d/data.bin", "\n"}});
  ASSERT_EQ(tree.files.size(), 2u);
  EXPECT_NE(tree.Find(".ci/run"), nullptr);
  EXPECT_NE(tree.Find("a.cc"), nullptr);
  EXPECT_TRUE(tree.Exists("d/data.bin"));
  EXPECT_FALSE(tree.Exists("build/b.cc"));
}

TEST(CodeOnlyTest, CommentsLiteralsAndDirectives_AreBlank) {
  EXPECT_EQ(CodeOnly("a /* { \n */ b // }\n"), "a      \n    b     \n");
  EXPECT_EQ(CodeOnly("x = \"}\\\"{\" + '{' + 1'000;"), "x =        +     + 1'000;");
  EXPECT_EQ(CodeOnly("R\"x({ \")x\" y"), "           y");
  EXPECT_EQ(CodeOnly("#define A {\\\n  {\nint b;"), "            \n   \nint b;");
}

TEST(FormatTest, FileThatIsNot_Fails) {
  const std::string clang_format = ClangFormat();
  if (clang_format.empty()) GTEST_SKIP() << "NO clang-format OF VERSION 14";
  const std::pair<std::string, std::string> style = {".clang-format", "BasedOnStyle: Google\n"};
  EXPECT_THAT(CheckFormat(Make({style, {"a.cc", "int a;\n"}}), clang_format), IsEmpty());
  EXPECT_THAT(
      CheckFormat(Make({style, {"a.cc", "int a;\n"}, {"b/c.h", "int  a ;\n"}}), clang_format),
      ElementsAre(HasSubstr("b/c.h:1")));
}

TEST(FunctionsTest, Shapes_AreFound) {
  const auto functions = FunctionsOf(
      "namespace a::b {\n"
      "template <typename T = int>\n"
      "struct S final : T {\n"
      " public:\n"
      "  S() : x_{1}, y_(2) {\n"
      "    if (x_) { y_ = 1; }\n"
      "  }\n"
      "  bool operator()(int i) const { return i; }\n"
      "  int x_{3}, y_;\n"
      "};\n"
      "enum class E { kA };\n"
      "constexpr int kTable[] = {1, 2};\n"
      "__global__ void __launch_bounds__(256) Kernel(int* x) {\n"
      "}\n"
      "auto X::Get(std::vector<int> v = {}) -> int {\n"
      "  const auto f = [&] { return 1; };\n"
      "  return f();\n"
      "}\n"
      "TEST_F(SuiteTest, Thing_Works) {\n"
      "}\n"
      "}\n");
  std::vector<std::string> found;
  for (const Function& f : functions)
    found.push_back(absl::StrCat(f.name, " ", f.first_line, " ", f.last_line));
  EXPECT_THAT(found, ElementsAre("S 5 7", "operator 8 8", "Kernel 13 14", "X::Get 15 18",
                                 "SuiteTest.Thing_Works 19 20"));
}

TEST(LengthTest, LongFunction_MustBeListed_AndShortOneMustNot) {
  const std::string shortest = "void F() {\n" + Lines(68) + "}\n";
  const std::string longer = "void F() {\n" + Lines(69) + "}\n";
  EXPECT_THAT(CheckFunctionLengths(Make({{"a.cc", shortest}})), IsEmpty());
  EXPECT_THAT(CheckFunctionLengths(Make({{"a.cc", longer}})),
              ElementsAre(HasSubstr("a.cc:F: 71 lines")));
  const auto listed = std::pair<std::string, std::string>(kLongFunctions, "a.cc:F  a kernel\n");
  EXPECT_THAT(CheckFunctionLengths(Make({{"a.cc", longer}, listed})), IsEmpty());
  EXPECT_THAT(CheckFunctionLengths(Make({{"a.cc", shortest}, listed})),
              ElementsAre(HasSubstr("take it out")));
  EXPECT_THAT(CheckFunctionLengths(Make({{"b.cc", shortest}, listed})),
              ElementsAre(HasSubstr("there is no a.cc:F")));
  EXPECT_THAT(CheckFunctionLengths(Make({{"a.cc", longer}, {kLongFunctions, "a.cc:F\n"}})),
              ElementsAre(HasSubstr("needs a reason"), HasSubstr("71 lines")));
}

TEST(LengthTest, LongFile_MustBeListed_AndShortOneMustNot) {
  const std::string longer(701, '\n'), shortest(700, '\n');
  EXPECT_THAT(CheckFileLengths(Make({{"a.h", shortest}})), IsEmpty());
  EXPECT_THAT(CheckFileLengths(Make({{"a.h", longer}})), ElementsAre(HasSubstr("701 lines")));
  const auto listed = std::pair<std::string, std::string>(kLongFiles, "a.h  one table\n");
  EXPECT_THAT(CheckFileLengths(Make({{"a.h", longer}, listed})), IsEmpty());
  EXPECT_THAT(CheckFileLengths(Make({{"a.h", shortest}, listed})),
              ElementsAre(HasSubstr("take it out")));
}

TEST(HeadersTest, Contract_IsDemanded) {
  EXPECT_THAT(CheckHeaders(Make({{"a.h", "// What: a.\nint A();\n"}})), IsEmpty());
  EXPECT_THAT(CheckHeaders(Make({{"a.h", "// A thing.\nint A();\n"}})),
              ElementsAre(HasSubstr("a.h:1")));
}

TEST(HeadersTest, PublicHeader_NeedsAnExample) {
  const std::pair<std::string, std::string> program = {"examples/1_a.cc", "int main() {}\n"};
  const auto check = [&](const std::string& text) {
    return CheckHeaders(
        Make({program, {"include/carrel/a.h", "// What: a.\n" + text + "int A();\n"}}));
  };
  EXPECT_THAT(check("// Example: A();   // examples/1_a.cc\n"), IsEmpty());
  EXPECT_THAT(check("// Example: A();   // examples/2_a.cc\n"),
              ElementsAre(HasSubstr("says no \"Example")));
  EXPECT_THAT(check(""), ElementsAre(HasSubstr("include/carrel/a.h:1")));
}

TEST(HeadersTest, KeptReference_NeedsOwnership) {
  for (const char* member :
       {"const Pool& pool_;", "Engine* const engine_ ABSL_GUARDED_BY(mu_) = nullptr;",
        "absl::string_view name_;", "absl::Span<const float> keys_;",
        "const char* at_{nullptr};"}) {
    const std::string text = absl::StrCat("// What: a.\nclass A {\n  ", member, "\n};\n");
    EXPECT_THAT(CheckHeaders(Make({{"a.h", text}})), ElementsAre(HasSubstr("Ownership"))) << member;
    EXPECT_THAT(
        CheckHeaders(Make({{"a.h", "// What: a.\n// Ownership: not.\n" + text.substr(11)}})),
        IsEmpty());
  }
  for (const char* other : {"std::unique_ptr<Pool> pool_;", "Pool* pool();", "int64_t count_ = 1;",
                            "std::vector<const float*> keys_;"}) {
    const std::string text = absl::StrCat("// What: a.\nclass A {\n  ", other, "\n};\n");
    EXPECT_THAT(CheckHeaders(Make({{"a.h", text}})), IsEmpty()) << other;
  }
}

TEST(ReadmesTest, EveryHeader_IsNamed) {
  const std::string header = "// What: a.\n";
  EXPECT_THAT(CheckReadmes(Make({{"a/x.h", header}, {"a/README.md", "`x.h`\n"}})), IsEmpty());
  EXPECT_THAT(CheckReadmes(Make({{"a/x.h", header}, {"a/README.md", "`xx.h`\n"}})),
              ElementsAre(HasSubstr("does not name x.h")));
  EXPECT_THAT(CheckReadmes(Make({{"a/b/x.h", header}, {"a/README.md", "`b/` or\n"}})), IsEmpty());
  EXPECT_THAT(CheckReadmes(Make({{"a/b/c/x.h", header}, {"a/README.md", "`b/c/`\n"}})), IsEmpty());
  EXPECT_THAT(CheckReadmes(Make({{"a/b/c/x.h", header}, {"a/README.md", "`b/`\n"}})),
              testing::SizeIs(1));
  EXPECT_THAT(CheckReadmes(Make({{"a/b/x.h", header}, {"a/README.md", "none\n"}})),
              ElementsAre(HasSubstr("a/b/x.h:1")));
}

TEST(ReadmesTest, FileThatIsNotThere_IsNotNamed) {
  const Tree tree = Make({{"a/x.h", ""},
                          {"a/y_cuda.cu", ""},
                          {"a/README.md", "`x.h`, `a/x.h`, `*_cuda.cu`, `carrel ask`, `x.cc`\n"}});
  EXPECT_THAT(CheckNamedFiles(tree), ElementsAre(HasSubstr("there is no x.cc")));
}

TEST(MembersTest, MemberThatIsNotThere_IsNotNamed) {
  const auto check = [](const std::string& text) {
    return CheckNamedMembers(
        Make({{"a.h", "class CARREL_API Store {\n  void Open();\n};\nenum class Want { kRows };\n"},
              {"docs/a.md", text + "\n"}}));
  };
  EXPECT_THAT(check("`Store::Open`, `carrel::Want::kRows`, `absl::Mutex::Lock` and Store::Gone "
                    "without marks"),
              IsEmpty());
  EXPECT_THAT(check("Text.\n`Store::Close`"),
              ElementsAre(HasSubstr("docs/a.md:2: there is no Store::Close")));
  EXPECT_THAT(check("`Shop::Open`"), ElementsAre(HasSubstr("there is no Shop::Open")));
}

TEST(LinksTest, DeadLink_AndDeadHeading_AreFound) {
  const Tree tree =
      Make({{"docs/a.md",
             "# One, two\n[x](b.md) [y](b.md#in-short) [z](#one-two)\n"
             "[h](https://host/x) [f](../run)\n"},
            {"docs/b.md", "## In short\n"},
            {"run", "#!/bin/sh\n"},
            {"c.md", "[x](docs/c.md)\n[y](docs/b.md#in-long)\n```\n[z](none)\n```\n"}});
  EXPECT_THAT(CheckLinks(tree), ElementsAre(HasSubstr("c.md:1: leads nowhere: docs/c.md"),
                                            HasSubstr("c.md:2: no such heading")));
}

TEST(DecisionsTest, NumberWithoutPage_IsFound) {
  const Tree tree = Make({{"docs/decisions/001-a.md", ""},
                          {"a.cc", "// decision 001, docs/decisions/001, decisions 001 and 002\n"},
                          {"b.md", "Why is in decision\n009.\n"}});
  EXPECT_THAT(CheckDecisions(tree), ElementsAre(HasSubstr("a.cc:1: there is no decision 002"),
                                                HasSubstr("b.md:1: there is no decision 009")));
}

TEST(SectionsTest, SectionOrDocumentThatIsNotThere_IsFound) {
  const Tree tree =
      Make({{"docs/formats.md", "## 1. Keys\n## Tables\nSee section 1 and section 7.\n"},
            {"docs/methods.md", "## Claims\n"},
            {"a.h", "// docs/formats.md, 1; formats.md, section 2; HATA, section 3\n"},
            {"b.h", "// docs/formats.md, \"Tables\"; formats.md, \"Chairs\"\n"},
            {"c.h", "// Source: methods F.\n"},
            {"d.h", "// targets.md\n"},
            {"e.h", "// (paper 001)\n"},
            {"f.h", "// HiP (docs/methods.md), section 3; see out/bench/gpu.md\n"},
            {"g.md", "In [formats](docs/formats.md), section 9, more.\n"}});
  EXPECT_THAT(CheckSections(tree),
              ElementsAre(HasSubstr("a.h:1: docs/formats.md has no section 2"),
                          HasSubstr("b.h:1: docs/formats.md has no section Chairs"),
                          HasSubstr("c.h:1: docs/methods.md has no section F"),
                          HasSubstr("d.h:1: there is no document targets.md"),
                          HasSubstr("docs/formats.md:3: there is no section 7"),
                          HasSubstr("e.h:1: say which"),
                          HasSubstr("g.md:1: docs/formats.md has no section 9")));
}

TEST(TraceTest, StaleStep_IsFound) {
  const std::string api = "class Api {\n  void Take() { Submit(); }\n};\n";
  const std::string queue = "void Queue::Submit() { RunNext(); }\nvoid Queue::RunNext() {}\n";
  const auto check = [&](const std::string& rows) {
    return CheckTrace(Make({{"a.cc", api}, {"b.cc", queue}, {kTracePage, rows}}));
  };
  const std::string take = "| 1 | `Api::Take` | `a.cc` | HTTP | It comes. |\n";
  const std::string submit = "| 2 | `Queue::Submit` | `b.cc` | HTTP | It waits. |\n";
  EXPECT_THAT(check(take + submit + "| 3 | `Queue::RunNext` | `b.cc` | one | It runs. |\n"),
              IsEmpty());
  EXPECT_THAT(check(""), ElementsAre(HasSubstr("no row of a table is a step")));
  EXPECT_THAT(check(take + "| 3 | `Queue::Submit` | `b.cc` | x | y |\n"),
              ElementsAre(HasSubstr("trace.md:2: step 3: is step 2")));
  EXPECT_THAT(check(take + "| 2 | `Queue::Submit` | `c.cc` | x | y |\n"),
              ElementsAre(HasSubstr("step 2: there is no c.cc: name the function")));
  EXPECT_THAT(check(take + "| 2 | `Queue::Take` | `b.cc` | x | y |\n"),
              ElementsAre(HasSubstr("b.cc has no Queue::Take: name the function")));
  EXPECT_THAT(
      check("| 1 | `Queue::Submit` | `b.cc` | x | y |\n| 2 | `Api::Take` | `a.cc` | x | y |\n"),
      ElementsAre(HasSubstr("no file of a step before it calls Take")));
}

TEST(VersionsTest, EachPlace_IsCompared) {
  const auto check = [](const std::string& program, const std::string& minor,
                        const std::string& changes, const std::string& image) {
    return CheckVersions(
        Make({{"CMakeLists.txt", "project(carrel VERSION 1.2.3 LANGUAGES CXX)\n"},
              {"common/version.h", "inline constexpr char kVersion[] = \"" + program + "\";\n"},
              {"include/carrel/version.h",
               "#define CARREL_VERSION_MAJOR 1\n#define CARREL_VERSION_MINOR " + minor +
                   "\n#define CARREL_VERSION_PATCH 3\n"},
              {"CHANGELOG.md", "# Changelog\n\n## " + changes + " (a day)\n\n## 1.0.0\n"},
              {"deploy/Containerfile", "# podman build -t carrel:" + image + "\n"}}));
  };
  EXPECT_THAT(check("1.2.3", "2", "1.2.3", "1.2.3"), IsEmpty());
  EXPECT_THAT(check("1.2.4", "2", "1.2.3", "1.2.3"),
              ElementsAre(HasSubstr("common/version.h:1: 1.2.4 is not 1.2.3")));
  EXPECT_THAT(check("1.2.3", "1", "1.2.3", "1.2.3"),
              ElementsAre(HasSubstr("include/carrel/version.h:1: 1.1.3")));
  EXPECT_THAT(check("1.2.3", "2", "1.1.0", "1.2.3"),
              ElementsAre(HasSubstr("CHANGELOG.md:3: 1.1.0")));
  EXPECT_THAT(check("1.2.3", "2", "1.2.3", "0.1.0"),
              ElementsAre(HasSubstr("Containerfile:1: 0.1.0")));
  EXPECT_THAT(CheckVersions(Make({{"a.cc", "\n"}})), ElementsAre(HasSubstr("no project")));
}

TEST(ChangelogTest, EntryOutOfASection_OrTooLong_IsFound) {
  const auto check = [](const std::string& text) {
    return CheckChangelog(Make({{"CHANGELOG.md", text}}));
  };
  EXPECT_THAT(check("## 1\n\n### Added\n\n- a\n"), IsEmpty());
  EXPECT_THAT(check("## 1\n\n### Added\n\n- a\n\n## 0\n\n- b\n"),
              ElementsAre(HasSubstr("CHANGELOG.md:9: an entry stands in a section")));
  EXPECT_THAT(check("### News\n\n- a\n"), ElementsAre(HasSubstr(":1: a section is Added")));
  EXPECT_THAT(check("### Fixed\n\n- a\n  b\n"), ElementsAre(HasSubstr(":4: an entry is one line")));
  EXPECT_THAT(check("### Fixed\n\n- " + std::string(kMostEntryCharacters, 'a') + "\n"),
              ElementsAre(HasSubstr(":3: an entry has at most")));
  EXPECT_THAT(CheckChangelog(Make({})), ElementsAre(HasSubstr("is not there")));
}

TEST(FlagsTest, StaleFlag_IsFound) {
  const std::string page =
      "## carrel ask\n```\n  --model TEXT  not --none\n  --top-k,--rows N\n```\n"
      "```\nThe lab of carrel ask\n  want=rows\n      what travels\n  logits\n```\n"
      "## carrel ls\n```\n  -j,--json  x\n```\n## carrel keys new\n```\n  --right T\n```\n";
  const auto check = [&](const std::string& text, const std::string& foreign = "") {
    return CheckFlags(Make({{kCliPage, page},
                            {"a.md", text},
                            {kForeignFlags, foreign},
                            {"run", "#!/bin/sh\nx --quick\n"}}));
  };
  EXPECT_THAT(
      check("With `--top-k` and `carrel ls --json`, `./run x --quick`, `carrel ls --help`\n"),
      IsEmpty());
  EXPECT_THAT(check("`keys new --right x`, `carrel ls | carrel ask --model`\n"), IsEmpty());
  EXPECT_THAT(check("With `--stale`\n"),
              ElementsAre(HasSubstr("a.md:1: nothing has a flag --stale")));
  EXPECT_THAT(check("Not `--none`, `ask --want rows --rows 3`, `--what`\n"),
              ElementsAre(HasSubstr("--none"), HasSubstr("--what")));
  EXPECT_THAT(check("`carrel ls --top-k 3`\n"), ElementsAre(HasSubstr("carrel ls has no --top-k")));
  EXPECT_THAT(check("`ls --model`, `ask --model` `--json`\n"),
              ElementsAre(HasSubstr("carrel ls has no --model")));
  EXPECT_THAT(check("```\n$carrel ls \\\n  --model x\n```\n"), ElementsAre(HasSubstr("a.md:3")));
  EXPECT_THAT(check("`peer --ctx`\n", "--ctx  of a peer\n"), IsEmpty());
  EXPECT_THAT(check("\n", "--ctx  of a peer\n"), ElementsAre(HasSubstr("take it out")));
}

TEST(RunTest, CommandThatIsNotThere_IsFound) {
  const auto check = [](const std::string& path, const std::string& text) {
    return CheckRunCommands(
        Make({{"run", "#!/bin/sh\n  test)\n    case x in\n      page) ;;\n  help | -h) usage ;;\n"},
              {path, text}}));
  };
  EXPECT_THAT(check("a.md", "`./run test page`, ./run help\n"), IsEmpty());
  EXPECT_THAT(check("a.md", "\n`./run page`\n"),
              ElementsAre(HasSubstr("a.md:2: ./run has no page")));
  EXPECT_THAT(check(".ci/nightly", "#!/bin/sh\n./run moon\n"),
              ElementsAre(HasSubstr(".ci/nightly:2: ./run has no moon")));
}

TEST(BordersTest, IncludeAgainstTheTable_IsFound) {
  const Tree tree =
      Make({{"decoder/zone/store_zone.cc", "#include \"decoder/client/wire.h\"\n"},
            {"decoder/client/wire.cc", "// up:\n#include \"decoder/zone/store_zone.h\"\n"},
            {"decoder/attic.h", "// What: none.\n"},
            {"kernels/select/topk/topk.cc", "#include \"kernels/layer/rope/rope.h\"\n"},
            {"kernels/select/topk/topk.h", "#include \"kernels/rows-inl.h\"\n"},
            {"kernels/select/topk/topk_test.cc", "#include \"kernels/layer/rope/rope.h\"\n"}});
  EXPECT_THAT(
      CheckInnerBorders(tree),
      ElementsAre(
          HasSubstr("decoder/attic.h:1: no room"),
          HasSubstr("decoder/client/wire.cc:2: decoder, client may not include zone"),
          HasSubstr(
              "kernels/select/topk/topk.cc:1: kernels, select/topk may not include layer/rope")));
}

TEST(ClocksTest, AWaitByAClockThatIsSet_IsFound) {
  const auto check = [](const std::string& path, const std::string& line) {
    return CheckClocks(Make({{path, "// absl::Now()\n" + line + "\n"}}));
  };
  EXPECT_THAT(check("http_api/b.cc", "until = absl::Now() + absl::Seconds(2);"),
              ElementsAre(HasSubstr("http_api/b.cc:2: absl::Now()")));
  EXPECT_THAT(check("http_api/b.h", "using C = std::chrono::system_clock;"), testing::SizeIs(1));
  EXPECT_THAT(check("http_api/b.cc", "created = absl::ToUnixSeconds(absl::Now());"), IsEmpty());
  EXPECT_THAT(check("http_api/b.cc", "until = SteadyNow() + absl::Seconds(2);"), IsEmpty());
  EXPECT_THAT(check("http_api/b_test.cc", "until = absl::Now();"), IsEmpty());
  EXPECT_THAT(check("kvstore/b.cc", "until = absl::Now();"), IsEmpty());
}

TEST(JsonTest, AParserOfTheLibrarys_IsFound) {
  const std::string begin = "#include <nlohmann/json.hpp>\n";
  const auto check = [&](const std::string& path, const std::string& line) {
    return CheckJson(Make({{path, begin + line + "\n"}}));
  };
  EXPECT_THAT(check("a/b.cc", "x = nlohmann::json::parse(text);"),
              ElementsAre(HasSubstr("a/b.cc:2: json::parse")));
  EXPECT_THAT(check("a/b.cc", "x = Json::parse(text);"), testing::SizeIs(1));
  EXPECT_THAT(check("a/b.cc", "x.value(\"type\", 3);"), testing::SizeIs(1));
  EXPECT_THAT(check("a/b.h", "x.dump();"), testing::SizeIs(1));
  EXPECT_THAT(check("a/b.cc", "result.value();  // json.dump()"), IsEmpty());
  EXPECT_THAT(check("a/b_test.cc", "x.dump();"), IsEmpty());
  EXPECT_THAT(check("common/json.cc", "x.dump();"), IsEmpty());
  EXPECT_THAT(CheckJson(Make({{"a/b.cc", "x.dump();\n"}})), IsEmpty());  // of something else
}

TEST(OverruledTest, OneSidedWord_IsFound) {
  const std::string old = "docs/decisions/001-a.md", young = "docs/decisions/002-b.md";
  EXPECT_THAT(
      CheckOverruled(Make({{old, "Replaced by [002](002-b.md).\n"}, {young, "Replaces 001.\n"}})),
      IsEmpty());
  EXPECT_THAT(CheckOverruled(Make({{old, "\n"}, {young, "Amends decision 001.\n"}})),
              ElementsAre(HasSubstr("002-b.md:1: Amends 001, which does not say Amended by 002")));
  EXPECT_THAT(
      CheckOverruled(Make({{old, "Overruled by 002.\n"}, {young, "\n"}})),
      ElementsAre(HasSubstr("001-a.md:1: Overruled by 002, which does not say Overrules 001")));
  EXPECT_THAT(
      CheckOverruled(Make({{old, "Superseded by [002](002-b.md).\n"}, {young, "\n"}})),
      ElementsAre(HasSubstr("001-a.md:1: Superseded by 002, which does not say Supersedes 001")));
}

TEST(ProseTest, LongDecision_IsFound) {
  std::string most = "# 001: a\n\n| b |\n";  // 6 words
  for (int i = 6; i < kMostDecisionWords; ++i) most += i % 9 == 0 ? "word\n" : "word  ";
  const std::string page = "docs/decisions/001-a.md";
  const std::string other = "docs/decisions/002-b.md", few = "# 002: b\n";
  EXPECT_THAT(CheckDecisionWords(Make({{page, most}, {other, few}})), IsEmpty());
  EXPECT_THAT(CheckDecisionWords(Make({{page, most + "one"}, {other, few}})),
              ElementsAre(HasSubstr("001-a.md:1: 401 words")));
  EXPECT_THAT(CheckDecisionWords(Make({{page, most}, {other, most}})),
              ElementsAre(HasSubstr("800 words of 2 decisions are more than 300 in the mean")));
  EXPECT_THAT(CheckDecisionWords(
                  Make({{"docs/decisions/README.md", most + "one"}, {"docs/a.md", most + "one"}})),
              IsEmpty());
}

TEST(ProseTest, LongLine_MustBeListed_AndListsMayOnlyShrink) {
  const auto line = [](int characters) { return std::string(characters, 'a') + "\n"; };
  std::string umlauts;
  for (int i = 0; i < kMostLineCharacters; ++i) umlauts += "\u00e4";
  EXPECT_THAT(CheckLineCharacters(Make({{"a.md", line(400) + umlauts + "\n" + "| " + line(900) +
                                                     "```\n" + line(900) + "```\n"},
                                        {"a.txt", line(900)}})),
              IsEmpty());
  const std::string two = "\n" + line(401) + "```\n```\n" + line(900);
  EXPECT_THAT(CheckLineCharacters(Make({{"a.md", two}})),
              ElementsAre(HasSubstr("a.md:5: of 2 lines over 400 characters, 0 may be; the first "
                                    "is line 2")));
  const auto listed = [&](const std::string& text, const std::string& list) {
    return CheckLineCharacters(Make({{"a.md", text}, {kLongLines, list}}));
  };
  EXPECT_THAT(listed(two, "a.md  2\n"), IsEmpty());
  EXPECT_THAT(listed(two, "a.md  1\n"), ElementsAre(HasSubstr("of 2 lines")));
  EXPECT_THAT(listed(line(401), "a.md  2\n"), ElementsAre(HasSubstr("has 1 of 2: lower it")));
  EXPECT_THAT(listed(line(9), "a.md  2\n"), ElementsAre(HasSubstr("has 0 of 2: take it out")));
  EXPECT_THAT(listed(line(9), "b.md  2\n"), ElementsAre(HasSubstr("there is no b.md")));
  EXPECT_THAT(listed(line(9), "a.md  some\n"), ElementsAre(HasSubstr("needs a number")));
}

// Bounds of 0 for all counters but one, and a file; what it breaks.
Violations Counted(const std::string& name, const std::string& bound, const std::string& path,
                   const std::string& code) {
  std::string list;
  for (const char* other :
       {"downcasts", "names-for-several", "wire-types-in-decoder", "enums-of-wants",
        "exact-8-bit-scans", "estimation-requests", "who-generates", "http-that-decodes",
        "window-launches", "decoder-refusals"}) {
    list += absl::StrCat(other, "  ", other == name ? bound : "0", "  0\n");
  }
  const bool counted = name == "forward-and-zone-lines" || path.starts_with("decoder/zone/");
  list += absl::StrCat("forward-and-zone-lines  ", counted ? "1" : "0", "  0\n");
  return CheckCounters(Make({{path, code + "\n"}, {kCounterBounds, list}}));
}

TEST(CountersTest, EachSpelling_IsCounted) {
  const struct {
    const char *name, *path, *code;
  } cases[] = {
      {"downcasts", "decoder/a.cc", "auto* a = dynamic_cast<const Zone*>(b);"},
      {"downcasts", "decoder/a.cc", "auto& a = static_cast<forward::CpuPass&>(b);"},
      {"names-for-several", "decoder/a.h", "void RunTogether();"},
      {"names-for-several", "decoder/a.h", "void StepBatched();"},
      {"wire-types-in-decoder", "decoder/zone/a.cc", "v1::TopKRequest request;"},
      {"wire-types-in-decoder", "decoder/zone/a.cc", "using namespace carrel::v1;"},
      {"enums-of-wants", "library/a.h", "enum class WantOf : uint8_t {};"},
      {"exact-8-bit-scans", "decoder/a.cc", "kernels::PackInt8(a, b);"},
      {"estimation-requests", "retrieval/a.h", "struct EstimateQuery {};"},
      {"who-generates", "tools/carrel/a.cc", "auto a = decoder::Generation::Begin(b);"},
      {"http-that-decodes", "http_api/a.h", "#include \"decoder/decoder.h\""},
      {"window-launches", "decoder/zone/a.cc", "kernels::WindowAttentionCudaParams params;"},
      {"window-launches", "decoder/zone/a.cc",
       "auto p = Common<kernels::WindowAttentionCudaParams>();"},
      {"decoder-refusals", "decoder/config.cc", "return absl::InvalidArgumentError(a);"},
  };
  for (const auto& [name, path, code] : cases) {
    EXPECT_THAT(Counted(name, "0", path, code), ElementsAre(HasSubstr("is 1, more than 0")))
        << code;
    EXPECT_THAT(Counted(name, "1", path, code), IsEmpty()) << code;
    EXPECT_THAT(Counted(name, "2", path, code), ElementsAre(HasSubstr("lower it from 2"))) << code;
  }
}

TEST(CountersTest, WhatIsNotMeant_IsNotCounted) {
  EXPECT_THAT(
      Counted("", "", "decoder/a.cc", "auto a = static_cast<float>(b);  // dynamic_cast<A*>"),
      IsEmpty());
  EXPECT_THAT(Counted("", "", "decoder/client/a.cc", "v1::TopKRequest request;"), IsEmpty());
  EXPECT_THAT(Counted("", "", "kernels/a.cc", "kernels::PackInt8(a, b);"), IsEmpty());
  EXPECT_THAT(Counted("", "", "decoder/a_test.cc", "auto a = dynamic_cast<A*>(b);"), IsEmpty());
  EXPECT_THAT(Counted("downcasts", "many", "a.cc", ""), ElementsAre(HasSubstr("needs a number")));
  EXPECT_THAT(CheckCounters(Make({{kCounterBounds, "moons  3  0\n"}})),
              testing::Contains(HasSubstr("nothing counts moons")));
}

}  // namespace
}  // namespace carrel::tidy
