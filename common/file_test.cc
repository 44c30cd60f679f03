#include "common/file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "common/mapped_file.h"
#include "common/test_util.h"

namespace carrel {
namespace {

TEST(FileTest, WriteThenReadAndMap_GivesTheBytes) {
  const std::string path = FreshTempDir() + "/file";
  const std::string bytes("a\0b", 3);
  CARREL_ASSERT_OK(WriteFileAtomically(path, "old"));
  CARREL_ASSERT_OK(WriteFileAtomically(path, bytes));
  EXPECT_EQ(*ReadFile(path), bytes);
  auto mapped = MappedFile::Open(path);
  CARREL_ASSERT_OK(mapped);
  EXPECT_EQ((*mapped)->bytes(), bytes);
  EXPECT_FALSE(std::filesystem::exists(path + ".tmp"));
}

TEST(FileTest, WriteAll_IsBehindWhatIsThere_AndSaysWhatFailed) {
  std::string bytes(300'001, ' ');  // several writes, the last one short
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31 / 7);
  const std::string path = FreshTempDir() + "/file";
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0600);
  CARREL_EXPECT_OK(WriteAll(fd, "", path));
  CARREL_EXPECT_OK(WriteAll(fd, "head", path));
  CARREL_EXPECT_OK(WriteAll(fd, bytes, path));
  close(fd);
  EXPECT_TRUE(*ReadFile(path) == "head" + bytes);
  const int full = open("/dev/full", O_WRONLY);
  EXPECT_THAT(WriteAll(full, bytes, "the part"),
              StatusIs(absl::StatusCode::kResourceExhausted, "the part"));
  close(full);
}

TEST(FileTest, Absent_NamesThePath) {
  EXPECT_THAT(ReadFile("/nonexistent/x"), StatusIs(absl::StatusCode::kNotFound, "/nonexistent/x"));
  EXPECT_THAT(MappedFile::Open("/nonexistent/x"),
              StatusIs(absl::StatusCode::kNotFound, "/nonexistent/x"));
  EXPECT_THAT(MappedFile::Open("/tmp"),
              StatusIs(absl::StatusCode::kInvalidArgument, "not a regular file"));
}

// Without a writer, a plain open would wait for ever.
TEST(FileTest, FifoOrDevice_IsRefusedAtOnce) {
  const std::string fifo = FreshTempDir() + "/fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& path : {fifo, std::string("/dev/zero"), std::string("/tmp")}) {
    EXPECT_THAT(ReadFile(path),
                StatusIs(absl::StatusCode::kInvalidArgument, path + ": not a regular file"));
    EXPECT_THAT(MappedFile::Open(path),
                StatusIs(absl::StatusCode::kInvalidArgument, path + ": not a regular file"));
  }
}

TEST(FileTest, FullDisk_SaysSo) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full on this system";
  // A link, so that the temporary name is the device too.
  const std::string folder = FreshTempDir();
  std::filesystem::create_symlink("/dev/full", folder + "/file.tmp");
  EXPECT_THAT(WriteFileAtomically(folder + "/file", "bytes"),
              StatusIs(absl::StatusCode::kResourceExhausted, "No space left"));
  EXPECT_FALSE(std::filesystem::exists(folder + "/file"));
}

TEST(ProbeRoomTest, RoomOrNone_LeavesNoFile) {
  const std::string folder = FreshTempDir();
  CARREL_EXPECT_OK(ProbeRoom(folder + "/file", 1 << 20, 1 << 16));
  EXPECT_THAT(ProbeRoom(folder + "/file", 0, int64_t{1} << 60),
              StatusIs(absl::StatusCode::kResourceExhausted, folder + "/file: room for"));
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

// What somebody declares is no reason to take the disk: the probe's file, which a second name keeps
// here, holds a few bytes of it.
TEST(ProbeRoomTest, DeclaredBytes_AreNotAllAllocated) {
  const std::string folder = FreshTempDir(), kept = folder + "/kept";
  CARREL_ASSERT_OK(WriteFileAtomically(folder + "/file.room", ""));
  std::filesystem::create_hard_link(folder + "/file.room", kept);
  const auto free = static_cast<int64_t>(std::filesystem::space(folder).available);
  if (free < 4 * kProbedBytes) GTEST_SKIP() << free << " bytes are free";
  CARREL_EXPECT_OK(ProbeRoom(folder + "/file", 0, free / 2));
  struct stat info;
  ASSERT_EQ(stat(kept.c_str(), &info), 0);
  EXPECT_LE(info.st_blocks * 512, kProbedBytes + (1 << 20));
  EXPECT_FALSE(std::filesystem::exists(folder + "/file.room"));
}

TEST(ProbeRoomTest, MoreThanIsFree_NamesBoth) {
  const std::string folder = FreshTempDir();
  const auto capacity = static_cast<int64_t>(std::filesystem::space(folder).capacity);
  EXPECT_THAT(ProbeRoom(folder + "/file", 0, 2 * capacity),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       absl::StrCat("room for ", 2 * capacity, " bytes at 0, ")));
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

// Of a size that fits the disk and not the limit: the end of the file is what is probed.
TEST(ProbeRoomTest, LimitOnFileSize_ShowsItself) {
  const std::string folder = FreshTempDir();
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = static_cast<rlim_t>(kProbedBytes);
  const auto usual = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status fits = ProbeRoom(folder + "/file", 0, kProbedBytes);
  const absl::Status beyond = ProbeRoom(folder + "/file", 0, kProbedBytes + 4096);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, usual);
  CARREL_EXPECT_OK(fits);
  EXPECT_THAT(beyond, StatusIs(absl::StatusCode::kResourceExhausted, "File too large"));
}

TEST(File, MoreThanTheBound_IsRefused) {
  const std::string path = FreshTempDir() + "/large";
  CARREL_ASSERT_OK(WriteFileAtomically(path, std::string(200000, 'x')));
  EXPECT_THAT(ReadFile(path, 199999).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "more than 199999 bytes"));
  EXPECT_EQ(ReadFile(path, 200000)->size(), 200000u);
}

TEST(FileTest, APrivateFile_IsItsOwnersAlone_WhateverWasThere) {
  const std::string path = FreshTempDir() + "/secret";
  CARREL_ASSERT_OK(WriteFileAtomically(path, "old"));
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  const mode_t before = umask(0);
  CARREL_ASSERT_OK(WritePrivateFile(path, "new"));
  umask(before);
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(*ReadFile(path), "new");
  EXPECT_FALSE(WritePrivateFile(path + "/no/folder", "x").ok());
}

}  // namespace
}  // namespace carrel
