// The repository keeps its own rules (CONTRIBUTING.md). That each rule can fail is in rules_test.cc.
#include <cstdlib>

#include "common/test_util.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

const Tree& Repository() {
  static const Tree tree = ReadTree(CARREL_SOURCE_DIR);
  return tree;
}

// One violation a line.
MATCHER(Holds, "holds") {
  for (const std::string& violation : arg) *result_listener << "\n  " << violation;
  return arg.empty();
}

TEST(TidyTest, TheScan_SeesTheTree) {
  EXPECT_GT(Repository().files.size(), 900u);
  EXPECT_NE(Repository().Find("README.md"), nullptr);
  EXPECT_NE(Repository().Find("run"), nullptr);
  EXPECT_EQ(Repository().Find("build/release/build.ninja"), nullptr);
}

TEST(TidyTest, Sources_AreFormatted) {
  const std::string clang_format = ClangFormat();
  if (clang_format.empty())
    GTEST_SKIP() << "NO clang-format OF VERSION 14: NOTHING WAS CHECKED. ./run deps installs it";
  EXPECT_THAT(CheckFormat(Repository(), clang_format), Holds());
}

TEST(TidyTest, Functions_AreShort) { EXPECT_THAT(CheckFunctionLengths(Repository()), Holds()); }

TEST(TidyTest, Files_AreShort) { EXPECT_THAT(CheckFileLengths(Repository()), Holds()); }

TEST(TidyTest, Headers_AreContracts) { EXPECT_THAT(CheckHeaders(Repository()), Holds()); }

TEST(TidyTest, Readmes_NameEveryHeader) { EXPECT_THAT(CheckReadmes(Repository()), Holds()); }

TEST(TidyTest, FilesInDocuments_Exist) { EXPECT_THAT(CheckNamedFiles(Repository()), Holds()); }

TEST(TidyTest, MembersInDocuments_Exist) { EXPECT_THAT(CheckNamedMembers(Repository()), Holds()); }

TEST(TidyTest, Links_LeadSomewhere) { EXPECT_THAT(CheckLinks(Repository()), Holds()); }

TEST(TidyTest, Decisions_ThatAreNamed_Exist) { EXPECT_THAT(CheckDecisions(Repository()), Holds()); }

TEST(TidyTest, Sections_ThatAreNamed_Exist) { EXPECT_THAT(CheckSections(Repository()), Holds()); }

TEST(TidyTest, TraceOfARequest_IsThatOfTheSources) {
  EXPECT_THAT(CheckTrace(Repository()), Holds());
}

TEST(TidyTest, Waits_AreCountedByAClockThatNobodySets) {
  EXPECT_THAT(CheckClocks(Repository()), Holds());
}

TEST(TidyTest, Flags_InDocuments_Exist) { EXPECT_THAT(CheckFlags(Repository()), Holds()); }

TEST(TidyTest, CommandsOfRun_Exist) { EXPECT_THAT(CheckRunCommands(Repository()), Holds()); }

// What runs each night lists commands that are there, and refuses parts that are not.
TEST(TidyTest, Nightly_ListsItsParts) {
  const std::string nightly = std::string(CARREL_SOURCE_DIR) + "/.ci/nightly";
  EXPECT_EQ(std::system((nightly + " --list | grep -q '^fuzz  *./run fuzz all 60$'").c_str()), 0);
  EXPECT_NE(std::system((nightly + " dusk 2>/dev/null").c_str()), 0);
}

TEST(TidyTest, LintedFolders_AreThere) {
  const TextFile* const list = Repository().Find("tests/tidy/linted.txt");
  ASSERT_NE(list, nullptr);
  for (const std::string& line : list->lines) {
    if (line.empty() || line[0] == '#') continue;
    EXPECT_TRUE(Repository().Exists(line)) << line << ": take it out, or name its new place";
  }
}

TEST(TidyTest, InnerBorders_AreKept) { EXPECT_THAT(CheckInnerBorders(Repository()), Holds()); }

TEST(TidyTest, Json_HasOneWayIn) { EXPECT_THAT(CheckJson(Repository()), Holds()); }

TEST(TidyTest, OverruledDecisions_SaySo) { EXPECT_THAT(CheckOverruled(Repository()), Holds()); }

TEST(TidyTest, Decisions_AreShort) { EXPECT_THAT(CheckDecisionWords(Repository()), Holds()); }

TEST(TidyTest, LinesOfDocuments_AreShort) {
  EXPECT_THAT(CheckLineCharacters(Repository()), Holds());
}

TEST(TidyTest, Versions_Agree) { EXPECT_THAT(CheckVersions(Repository()), Holds()); }

TEST(TidyTest, Changelog_HasSectionsAndShortEntries) {
  EXPECT_THAT(CheckChangelog(Repository()), Holds());
}

TEST(TidyTest, Counters_OnlyFall) { EXPECT_THAT(CheckCounters(Repository()), Holds()); }

}  // namespace
}  // namespace carrel::tidy
