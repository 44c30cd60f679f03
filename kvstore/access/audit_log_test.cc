#include "kvstore/access/audit_log.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <thread>
#include <vector>

#include "absl/strings/str_split.h"
#include "common/file.h"
#include "common/test_util.h"
#include "nlohmann/json.hpp"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

std::vector<std::string> Lines(const std::string& path) {
  std::vector<std::string> lines = absl::StrSplit(*ReadFile(path), '\n');
  EXPECT_EQ(lines.back(), "");
  lines.pop_back();
  return lines;
}

TEST(AuditLogTest, Line_SaysWhoWhatAndHowItEnded) {
  const AuditEvent event = {.event = "open",
                            .key = "reader",
                            .tenant = "acme",
                            .peer = "ipv4:10.0.0.1:99",
                            .rpc = "RetrievalService.Session",
                            .context = "acme.report",
                            .content_id = "c0ffee",
                            .tokens = 700,
                            .bytes = 12345,
                            .result = absl::NotFoundError("gone")};
  EXPECT_EQ(
      AuditLine(event, absl::FromUnixMillis(1795453200123)),
      R"({"time":"2026-11-23T17:00:00.123Z","event":"open","key":"reader","tenant":"acme",)"
      R"("peer":"ipv4:10.0.0.1:99","rpc":"RetrievalService.Session","context":"acme.report",)"
      R"("content_id":"c0ffee","tokens":700,"bytes":12345,"result":"NOT_FOUND","reason":"gone"})");
}

TEST(AuditLogTest, NamesOfStrangers_StayWithinTheirLine) {
  AuditEvent event;
  event.context = std::string("a\nb\"\x1b\xff\x00", 8);
  const std::string line = AuditLine(event, absl::Now());
  EXPECT_EQ(line.find('\n'), std::string::npos);
  EXPECT_EQ(line.find('\x1b'), std::string::npos);
  EXPECT_TRUE(nlohmann::json::accept(line)) << line;
}

TEST(AuditLogTest, ManyThreads_EachLineIsWholeAndThere) {
  const std::string path = FreshTempDir() + "/audit.jsonl";
  auto log = AuditLog::Open(path);
  CARREL_ASSERT_OK(log);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i)
        (*log)->Write({.event = "open", .context = absl::StrCat(t, "-", i)});
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<std::string> lines = Lines(path);
  EXPECT_EQ(lines.size(), 800u);
  for (const std::string& line : lines) EXPECT_TRUE(nlohmann::json::accept(line)) << line;
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST(AuditLogTest, Reopen_GoesOnInANewFileOfTheName) {
  const std::string path = FreshTempDir() + "/audit.jsonl";
  auto log = AuditLog::Open(path);
  CARREL_ASSERT_OK(log);
  (*log)->Write({.context = "one"});
  std::filesystem::rename(path, path + ".1");
  (*log)->Write({.context = "two"});  // still there: nothing is lost between
  CARREL_ASSERT_OK((*log)->Reopen());
  (*log)->Write({.context = "three"});
  EXPECT_EQ(Lines(path + ".1").size(), 2u);
  EXPECT_EQ(Lines(path).size(), 1u);
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  EXPECT_FALSE((*log)->Reopen().ok());
  EXPECT_FALSE(AuditLog::Open(path).ok());
  EXPECT_THAT(AuditLog::Open("/dev/null"),
              StatusIs(StatusCode::kInvalidArgument, "no regular file"));
}

TEST(AuditLogTest, LineThatCannotBeWritten_TearsNone) {
  const std::string path = FreshTempDir() + "/audit.jsonl";
  auto log = AuditLog::Open(path);
  CARREL_ASSERT_OK(log);
  (*log)->Write({.context = "one"});
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before, small;
  getrlimit(RLIMIT_FSIZE, &before);
  small = before;
  small.rlim_cur = std::filesystem::file_size(path) + 20;  // a part of a line
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  (*log)->Write({.context = "two"});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  (*log)->Write({.context = "three"});
  const std::vector<std::string> lines = Lines(path);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_TRUE(nlohmann::json::accept(lines[1])) << lines[1];
}

}  // namespace
}  // namespace carrel::kvstore
