#include "common/file_watch.h"

#include <atomic>
#include <filesystem>
#include <stdexcept>

#include "absl/time/clock.h"
#include "common/file.h"
#include "common/test_util.h"

namespace carrel {
namespace {

TEST(FileWatchTest, FilesWrittenReplacedRemovedAndMade_AreSeen) {
  const std::string dir = FreshTempDir();
  const std::string a = dir + "/a", b = dir + "/b";
  CARREL_ASSERT_OK(WriteFileAtomically(a, "1"));
  std::atomic<int> calls{0};
  FileWatch watch({a, b}, absl::Milliseconds(1), [&] { ++calls; });
  const auto await = [&](int before) {
    while (calls == before) absl::SleepFor(absl::Milliseconds(1));
  };
  CARREL_ASSERT_OK(WriteFileAtomically(a, "2"));  // the same size
  await(0);
  int before = calls;
  CARREL_ASSERT_OK(WriteFileAtomically(b, "new"));
  await(before);
  before = calls;
  std::filesystem::remove(a);
  await(before);
  before = calls;
  std::filesystem::rename(b, a);
  await(before);
}

TEST(FileWatchTest, WhatIsThrownOfAChange_EndsNeitherTheWatchNorTheProcess) {
  const std::string file = FreshTempDir() + "/a";
  std::atomic<int> calls{0};
  FileWatch watch({file}, absl::Milliseconds(1), [&] {
    if (++calls == 1) throw std::runtime_error("planted");
  });
  CARREL_ASSERT_OK(WriteFileAtomically(file, "1"));
  while (calls == 0) absl::SleepFor(absl::Milliseconds(1));
  CARREL_ASSERT_OK(WriteFileAtomically(file, "22"));
  while (calls == 1) absl::SleepFor(absl::Milliseconds(1));
}

TEST(FileWatchTest, NothingChanged_IsNotCalled) {
  const std::string dir = FreshTempDir();
  CARREL_ASSERT_OK(WriteFileAtomically(dir + "/a", "1"));
  std::atomic<int> calls{0};
  {
    FileWatch watch({dir + "/a", dir + "/none"}, absl::Milliseconds(1), [&] { ++calls; });
    absl::SleepFor(absl::Milliseconds(30));
  }
  EXPECT_EQ(calls, 0);
}

}  // namespace
}  // namespace carrel
